"""Encoders: one file a family, of which most have a classifier too. Their attention sees the whole prompt."""

from __future__ import annotations

from ..heads import Reader
from . import bert, distilbert, gte, modernbert, mpnet, nomic_bert

# By the names of config.json: architecture -> (model_type, reader). A masked language head is not read.
ENCODERS: dict[str, tuple[str, Reader]] = {
    "BertModel": ("bert", bert.read_spec),
    "BertForMaskedLM": ("bert", bert.read_spec),
    "BertForSequenceClassification": ("bert", bert.read_classifier),
    "RobertaModel": ("roberta", bert.read_roberta_spec),
    "RobertaForMaskedLM": ("roberta", bert.read_roberta_spec),
    "RobertaForSequenceClassification": ("roberta", bert.read_roberta_classifier),
    "XLMRobertaModel": ("xlm-roberta", bert.read_roberta_spec),
    "XLMRobertaForMaskedLM": ("xlm-roberta", bert.read_roberta_spec),
    "XLMRobertaForSequenceClassification": ("xlm-roberta", bert.read_roberta_classifier),
    "CamembertModel": ("camembert", bert.read_roberta_spec),
    "CamembertForMaskedLM": ("camembert", bert.read_roberta_spec),
    "CamembertForSequenceClassification": ("camembert", bert.read_roberta_classifier),
    "DistilBertModel": ("distilbert", distilbert.read_spec),
    "DistilBertForMaskedLM": ("distilbert", distilbert.read_spec),
    "DistilBertForSequenceClassification": ("distilbert", distilbert.read_classifier),
    "MPNetModel": ("mpnet", mpnet.read_spec),
    "MPNetForMaskedLM": ("mpnet", mpnet.read_spec),
    "MPNetForSequenceClassification": ("mpnet", mpnet.read_classifier),
    "ModernBertModel": ("modernbert", modernbert.read_spec),
    "ModernBertForMaskedLM": ("modernbert", modernbert.read_spec),
    "ModernBertForSequenceClassification": ("modernbert", modernbert.read_classifier),
    "NewModel": ("new", gte.read_spec),
    "NewForMaskedLM": ("new", gte.read_spec),
    "NewForSequenceClassification": ("new", gte.read_classifier),
    "GteModel": ("gte", gte.read_spec),
    "GteForSequenceClassification": ("gte", gte.read_classifier),
    "NomicBertModel": ("nomic_bert", nomic_bert.read_spec),
    "NomicBertForSequenceClassification": ("nomic_bert", nomic_bert.read_classifier),
}
