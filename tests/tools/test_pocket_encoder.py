"""The encoder's corpus keeps what is held out, and the shipped encoder finds what it never saw."""

import re
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch
from quire.tools.pocket.encoder import ENCODER_DIR
from quire.tools.pocket.encoder.concepts import SYNONYMS, make_participle, make_plural, replace_words
from quire.tools.pocket.encoder.corpus import draw_pairs, draw_texts
from quire.tools.pocket.encoder.episodes import FRAMES, draw_episode, is_combination_held_out
from quire.tools.pocket.encoder.evaluate import Encoder, draw_held_out_episodes, score_orders, score_retrieval
from quire.tools.pocket.encoder.everyday import MATTERS, draw_everyday
from quire.tools.pocket.encoder.facts import KINDS, draw_fact
from quire.tools.pocket.encoder.pairs import Pair, Passage
from quire.tools.pocket.encoder.strange import draw_shared_words
from quire.tools.pocket.encoder.tokenizer import UNKNOWN, VOCAB_SIZE, train_tokenizer
from quire.tools.pocket.encoder.train import Trainer, average, export, find_same_topics, make_config
from tokenizers import Tokenizer
from transformers import BertModel

pytestmark = pytest.mark.slow

SIZE_LIMIT_BYTES = 4_000_000
SLOT = re.compile(r"\\\{\w+\\\}")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(draw_texts(seed=3, count=500))


def match_any(forms: list[str]) -> re.Pattern[str]:
    """What any of these templates can become."""
    return re.compile("|".join(SLOT.sub(".+", re.escape(form)) for form in forms))


def test_no_episode_of_the_training_text_has_a_held_out_combination() -> None:
    rng = Random(1)
    pairs = [draw_episode(rng) for _ in range(500)]
    assert not [
        text
        for pair in pairs
        for text in (pair.answer.text, pair.wrong.text)
        if is_combination_held_out(text)
    ]
    assert all(is_combination_held_out(pair.answer.text) for pair in draw_held_out_episodes())


def test_a_combination_is_its_people_places_and_things_in_any_wording() -> None:
    things = ["Mia lost a red kite in Oslo. Ben found it.", "In Oslo Ben saw the red kite of Mia."]
    assert len({is_combination_held_out(text) for text in things}) == 1
    shares = [
        is_combination_held_out(draw_episode(Random(seed), seed % 8 == 0).answer.text) for seed in range(64)
    ]
    assert sum(shares) == 8


def test_held_out_questions_are_asked_in_no_training_text() -> None:
    rng = Random(2)
    held_out = match_any([form for frame in FRAMES for form in frame.held_out_questions])
    assert not [
        pair.query for pair in (draw_episode(rng) for _ in range(500)) if held_out.fullmatch(pair.query)
    ]
    held_out = match_any([form for kind in KINDS for form in kind.held_out_questions])
    assert not [pair.query for pair in (draw_fact(rng) for _ in range(500)) if held_out.fullmatch(pair.query)]
    everyday = {matter.held_out_question for matter in MATTERS}
    pairs = [draw_everyday(rng) for _ in range(1000)]
    assert not everyday & {text for pair in pairs for text in (pair.query, pair.answer.text, pair.wrong.text)}


def test_a_text_answers_its_query_alone() -> None:
    for pair in islice(draw_pairs(4), 1000):
        assert pair.answer.topic is None or pair.answer.topic != pair.wrong.topic
        assert pair.answer.text != pair.wrong.text
        assert "{" not in pair.query + pair.answer.text


def test_a_text_without_meaning_holds_the_words_that_are_asked_for() -> None:
    rng = Random(5)
    for _ in range(200):
        pair = draw_shared_words(rng)
        asked = [word for word in pair.query.split() if len(word) > 6 and word in pair.answer.text]
        assert pair.wrong.text != pair.answer.text
        assert not asked or any(word not in pair.wrong.text for word in pair.query.split())


def test_words_are_replaced_by_words_of_one_meaning_only() -> None:
    assert "car" in SYNONYMS["automobile"]
    assert replace_words(Random(1), "Their automobile", 1.0).split()[1] in SYNONYMS["automobile"]
    assert "orange" not in SYNONYMS


@pytest.mark.parametrize(
    ("word", "plural", "participle"),
    [
        ("box", "boxes", "boxing"),
        ("cry", "cries", "crying"),
        ("bake", "bakes", "baking"),
        ("run", "runs", "running"),
    ],
)
def test_words_are_inflected_as_regular_ones(word: str, plural: str, participle: str) -> None:
    assert (make_plural(word), make_participle(word)) == (plural, participle)


def test_an_inflected_word_begins_with_the_token_of_its_stem(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() <= VOCAB_SIZE
    for stem, inflected in (("lamp", "lamps"), ("password", "passwords"), ("walk", "walking")):
        assert tokenizer.encode(inflected).tokens[1] == tokenizer.encode(stem).tokens[1] == stem


def test_latin_greek_and_cyrillic_words_are_known_by_their_letters(tokenizer: Tokenizer) -> None:
    for text in ("Kubernetes zürich", "Αθήνα", "Привет", "E-404 foo_bar(x)"):
        assert UNKNOWN not in tokenizer.encode(text).tokens


def test_a_pair_of_texts_is_separated_and_typed_as_berts(tokenizer: Tokenizer) -> None:
    encoding = tokenizer.encode("a lamp", "the sun")
    assert encoding.tokens == ["[CLS]", "a", "lamp", "[SEP]", "the", "sun", "[SEP]"]
    assert encoding.type_ids == [0, 0, 0, 0, 1, 1, 1]


def test_a_query_is_compared_with_no_other_passage_of_its_topic() -> None:
    pairs = [
        Pair("q", Passage("a", "x"), Passage("b", "y")),
        Pair("r", Passage("c", "y"), Passage("d", "z")),
        Pair("s", Passage("e"), Passage("f")),
        Pair("t", Passage("g", "x"), Passage("h", "z")),
    ]
    assert find_same_topics(pairs).nonzero().tolist() == [[0, 3], [1, 4], [3, 0]]


def test_the_average_leaves_padding_out() -> None:
    hidden = torch.tensor([[[1.0], [3.0], [100.0]], [[2.0], [4.0], [6.0]]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    assert average(hidden, mask).tolist() == [[2.0], [4.0]]


def test_training_lowers_the_loss_and_writes_a_folder_that_embeds(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    trainer = Trainer(BertModel(make_config(VOCAB_SIZE), add_pooling_layer=False), tokenizer, num_steps=100)
    pairs = list(islice(draw_pairs(8), 8))
    with torch.enable_grad():  # an engine in this process has none
        losses = [trainer.step(pairs, step) for step in range(1, 5)]
    assert losses[-1] < losses[0]
    export(trainer.averaged_model, tokenizer, tmp_path)
    vectors = Encoder(tmp_path).embed(["a lamp", "a lamp in the house and a longer text", "a lamp"])
    assert torch.allclose(vectors.norm(dim=1), torch.ones(3))
    assert torch.allclose(vectors[0], vectors[2])


def test_the_shipped_encoder_is_at_most_4_mb() -> None:
    assert sum(path.stat().st_size for path in ENCODER_DIR.rglob("*") if path.is_file()) <= SIZE_LIMIT_BYTES


def test_the_shipped_encoder_finds_the_paragraph_of_nine_in_ten_held_out_questions_among_the_first_five() -> (
    None
):
    pairs = draw_held_out_episodes()
    assert len(pairs) == 200
    assert len(score_retrieval(Encoder(ENCODER_DIR), "episodes", pairs, 5).failures) <= 20


def test_the_shipped_encoder_orders_everyday_texts_as_people_do() -> None:
    assert len(score_orders(Encoder(ENCODER_DIR)).failures) <= 4
