"""Encoders: one file a family, of which most have a classifier too. Their attention sees the whole prompt."""

from __future__ import annotations

from ..heads import Reader
from . import bert, distilbert, gte, modernbert, mpnet, nomic_bert
from .parts import with_pooler, with_pre_classifier, with_two_layers

_roberta, _roberta_classifier = bert.read_roberta_spec, with_two_layers(bert.read_roberta_spec)
# Name -> (model_type, reader, reader of its classifier).
_FAMILIES: dict[str, tuple[str, Reader, Reader]] = {
    "Bert": ("bert", bert.read_spec, with_pooler(bert.read_spec)),
    "Roberta": ("roberta", _roberta, _roberta_classifier),
    "XLMRoberta": ("xlm-roberta", _roberta, _roberta_classifier),
    "Camembert": ("camembert", _roberta, _roberta_classifier),
    "DistilBert": ("distilbert", distilbert.read_spec, with_pre_classifier(distilbert.read_spec)),
    "MPNet": ("mpnet", mpnet.read_spec, with_two_layers(mpnet.read_spec)),
    "ModernBert": ("modernbert", modernbert.read_spec, modernbert.read_classifier),
    "New": ("new", gte.read_spec, with_pooler(gte.read_spec)),
    "Gte": ("gte", gte.read_spec, with_pooler(gte.read_spec)),
    "NomicBert": ("nomic_bert", nomic_bert.read_spec, nomic_bert.read_classifier),
}
_NO_CLASS = ("GteForMaskedLM", "NomicBertForMaskedLM")
# By the names of config.json: architecture -> (model_type, reader). A masked language head is not read.
ENCODERS: dict[str, tuple[str, Reader]] = {
    family + part: (model_type, reader)
    for family, (model_type, read, classify) in _FAMILIES.items()
    for part, reader in (("Model", read), ("ForMaskedLM", read), ("ForSequenceClassification", classify))
    if family + part not in _NO_CLASS
}
