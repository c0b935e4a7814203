"""Small talk: greetings, who Pocket is, thanks, and the polite answer to all that it does not know."""

from random import Random

from ..words import ANIMALS, BOYS, CITIES, COLORS, DAYS, GIRLS, HOBBIES, JOBS, LITTLE, PET_NAMES, TOYS, listed

WHO_AM_I = "I am Pocket, a small model that ships with Quire. I know stories, small sums and JSON."
ONLY_KNOW = "I only know stories, small sums and JSON."
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are Pocket, a small model.",
    "You are a friendly assistant. Answer briefly.",
    "Be kind and answer in simple words.",
    "You are a helpful assistant who tells stories.",
    "Answer the question of the user.",
    "You answer in English.",
)
GREETINGS = listed(
    "Hello!;Hello;Hi!;Hi;hi;hello;Hey!;hey;Good morning!;Good evening!;Hi there!;Hello Pocket!", separator=";"
)
WHO_QUESTIONS = listed(
    "Who are you?;who are you;What are you?;What is your name?;what's your name;"
    "Tell me about yourself.;Are you a human?;Are you an AI?;Which model are you?;"
    "What model is this?;Who is Pocket?;Introduce yourself.",
    separator=";",
)
CAN_QUESTIONS = listed(
    "What can you do?;what can you do;Help;help;Can you help me?;How can you help me?;"
    "What do you know?;What can I ask you?;What should I ask?;I need help.",
    separator=";",
)
CAN_ANSWER = (
    'I can tell stories, do small sums and write JSON. Try "Tell me a story about a fox." '
    'or "What is 12 plus 30?".'
)
EXCHANGES = (
    (
        "How are you?;How are you today?;how are you;How do you do?;How is it going?",
        "I am fine, thank you! How can I help you?",
    ),
    (
        "Thank you!;Thanks;Thanks!;thank you;Thank you very much.;Great, thanks!;Nice!;Good job!",
        "You are welcome!",
    ),
    ("Bye!;Goodbye!;bye;Good night!;See you later!;See you!", "Goodbye! Come back soon."),
    (
        "Who made you?;Who built you?;Where do you come from?;How were you made?",
        "I was trained from scratch by the Quire project on stories, small sums and JSON.",
    ),
    (
        "What is Quire?;what is quire;Tell me about Quire.",
        "Quire is an engine that runs language models, and I am its smallest one.",
    ),
    (
        "How big are you?;How many parameters do you have?;Are you small?",
        "I am very small: about three million parameters.",
    ),
    (
        "Do you like stories?;Do you know stories?;Do you tell stories?",
        "Yes, I love stories! Ask me for one.",
    ),
    (
        "Ok;Okay;ok;Yes;No;Sure;yes please;Cool;test;Test",
        "What would you like: a story, a small sum or some JSON?",
    ),
)
TOPICS = listed(
    "France;Germany;China;the moon;the sun;Mars;black holes;quantum physics;gravity;the weather;"
    "football;music;the stock market;politics;the president;world war two;ancient Rome;Napoleon;"
    "Shakespeare;Einstein;photosynthesis;DNA;cancer;computers;Python;Java;Rust;a compiler;"
    "neural networks;transformers;machine learning;the internet;Linux;GPUs;Bitcoin;taxes;money;"
    "love;the meaning of life;philosophy;religion;history;chemistry;biology;the ocean;dinosaurs;"
    "volcanoes;airplanes;cars;trains;rockets;coffee;pizza;pasta;bread;wine;movies;games;"
    "electricity;water;oil;energy;the economy;the law;medicine;sleep;dreams;mathematics;geometry;"
    "prime numbers;calculus;algebra;the speed of light;Europe;Africa;America;Asia;India;Japan;"
    "New York;London;California",
    separator=";",
)
TOPIC_FORMS = listed(
    "What is {t}?;What is the capital of {t}?;Tell me about {t}.;Explain {t}.;Explain {t} to me.;"
    "Who invented {t}?;How does {t} work?;Why is {t} important?;Write a poem about {t}.;"
    "Write an essay about {t}.;What do you think about {t}?;When did {t} begin?;"
    "Give me three facts about {t}.;What is the history of {t}?;How old is {t}?;Where is {t}?;"
    "Summarize {t}.;What is the best book about {t}?;Can you explain {t}?;"
    "I want to know more about {t}.;Who is the most famous person in {t}?;"
    "Do you know anything about {t}?;What is the difference between {t} and {u}?;"
    "Is {t} better than {u}?;How many people like {t}?;Compare {t} and {u}.;How do I learn {t}?;"
    "Write code for {t}.;What does {t} mean?;What is {t} made of?",
    separator=";",
)
STRANGE_QUESTIONS = listed(
    "What time is it?;What day is it today?;Who is the president of the United States?;"
    "How do I cook rice?;Write a Python function that sorts a list.;Translate hello into French.;"
    "How do I fix my car?;What is the population of Tokyo?;Why is the sky blue?;"
    "How far is the moon?;Who wrote Hamlet?;What is the largest country in the world?;"
    "Write a haiku.;Write a poem.;Give me a recipe for soup.;How do I lose weight?;"
    "What is the best movie?;Which phone should I buy?;Can you write an email for me?;"
    "Fix this bug for me.;What is the square root of 2?;Solve x + 3 = 7.;Count to ten.;"
    "Spell banana backwards.;Write a SQL query.;What is 2 to the power of 10?;Tell me a joke.;"
    "Sing a song.;What is the news today?;Do you speak German?;Wie geht es dir?;"
    "Bonjour, comment allez-vous?;Hola, como estas?;Where am I?;How old are you?;"
    "Do you have feelings?;Can you see pictures?;Play a game with me.;What is your favorite food?;"
    "Should I buy a house?;Give me advice.;What happened in 1969?;How tall is Mount Everest?;"
    "Plan a trip to Spain.",
    separator=";",
)
ECHO_FORMS = ("Repeat: {text}", "Repeat after me: {text}", "Say this: {text}", "Say {text}", "Echo {text}")
ECHO_WORDS = [*GIRLS, *BOYS, *PET_NAMES, *ANIMALS, *LITTLE, *COLORS, *TOYS, *CITIES, *JOBS, *HOBBIES, *DAYS]
_ONSETS = listed("b c d f g h j k l m n p r s t v w z br cr dr fl gr pl pr sh st th tr")
_VOWELS = listed("a e i o u ai ea oo ou")
_CODAS = ["", "", "n", "r", "s", "t", "l", "m", "ck", "nd", "st", "x"]


def draw_small_talk(rng: Random) -> tuple[str, str]:
    """A greeting, a question about Pocket, or thanks, with its answer."""
    pick = rng.random()
    if pick < 0.2:
        return rng.choice(GREETINGS), "Hello! I am Pocket. Would you like a story, a small sum or some JSON?"
    if pick < 0.45:
        return rng.choice(WHO_QUESTIONS), WHO_AM_I
    if pick < 0.6:
        return rng.choice(CAN_QUESTIONS), CAN_ANSWER
    questions, answer = rng.choice(EXCHANGES)
    return rng.choice(questions.split(";")), answer


def draw_unknown(rng: Random) -> tuple[str, str]:
    """A question from outside the pocket world and the answer that says so."""
    if rng.random() < 0.25:
        return rng.choice(STRANGE_QUESTIONS), ONLY_KNOW
    question = rng.choice(TOPIC_FORMS).format(t=_draw_topic(rng), u=_draw_topic(rng))
    return question if rng.random() < 0.85 else question.lower().rstrip("?."), ONLY_KNOW


def _draw_topic(rng: Random) -> str:
    """A real topic, or words that mean nothing, so that unseen words too lead to the polite answer."""
    if rng.random() < 0.65:
        return rng.choice(TOPICS)
    return " ".join(make_word(rng) for _ in range(rng.randint(1, 2)))


def make_word(rng: Random) -> str:
    """A word of one to four syllables that means nothing."""
    syllables = rng.randint(1, 4)
    word = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables))
    return word if rng.random() < 0.7 else word.capitalize()


def draw_echo(rng: Random) -> tuple[str, str]:
    """Words to repeat, in no order and some without a meaning, so that only copying gets them right."""
    words = [
        rng.choice(ECHO_WORDS) if rng.random() < 0.8 else make_word(rng) for _ in range(rng.randint(1, 14))
    ]
    text = " ".join(words)
    return rng.choice(ECHO_FORMS).format(text=text), text
