"""Model families: one file each turns config.json into a ModelSpec. Nothing here imports torch.

A family is a module with a `read_spec` and a row of `_DECODERS` or `encoders.ENCODERS`. A key for which
transformers' config class has a default may be absent, and has the same default here. A key that no reader
has asked for, and whose name speaks of arithmetic, is refused by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, cast

from msgspec.structs import replace

from ....ipc.errors import ModelError, shorten
from ....ipc.spec.model_spec import ModelSpec
from . import (
    apertus,
    arcee,
    bamba,
    cohere,
    deepseek,
    dots1,
    ernie4_5,
    ernie4_5_moe,
    exaone4,
    falcon,
    gemma,
    gemma2,
    gemma3,
    gemma4,
    glm,
    glm4_moe,
    gpt2,
    gpt_bigcode,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    helium,
    hunyuan_v1_dense,
    lfm2,
    llama,
    llama4,
    minicpm3,
    minimax_m2,
    ministral,
    ministral3,
    mistral,
    mistral4,
    mixtral,
    nemotron,
    nemotron_h,
    olmo,
    olmo2,
    olmo3,
    olmoe,
    opt,
    phi,
    phi3,
    phimoe,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    qwen3_next,
    seed_oss,
    smollm3,
    solar_open,
    stablelm,
    starcoder2,
)
from .config_fields import ConfigFields
from .encoders import ENCODERS
from .heads import Reader, with_rewards, with_scores, without_head, without_mask
from .wrapped import find_wrapper, unwrap, with_stored_names

# By the names of config.json: architecture -> (model_type, reader).
_DECODERS: dict[str, tuple[str, Reader]] = {
    "ApertusForCausalLM": ("apertus", apertus.read_spec),
    "ArceeForCausalLM": ("arcee", arcee.read_spec),
    "BambaForCausalLM": ("bamba", bamba.read_spec),
    "Cohere2ForCausalLM": ("cohere2", cohere.read_spec_2),
    "CohereForCausalLM": ("cohere", cohere.read_spec),
    "CwmForCausalLM": ("cwm", llama.read_cwm_spec),
    "DeepseekV2ForCausalLM": ("deepseek_v2", deepseek.read_v2_spec),
    "DeepseekV32ForCausalLM": ("deepseek_v32", deepseek.read_v32_spec),
    "DeepseekV3ForCausalLM": ("deepseek_v3", deepseek.read_v3_spec),
    "Dots1ForCausalLM": ("dots1", dots1.read_spec),
    "Ernie4_5_MoeForCausalLM": ("ernie4_5_moe", ernie4_5_moe.read_spec),
    "Ernie4_5ForCausalLM": ("ernie4_5", ernie4_5.read_spec),
    "Exaone4ForCausalLM": ("exaone4", exaone4.read_spec),
    "FalconForCausalLM": ("falcon", falcon.read_spec),
    "FlexOlmoForCausalLM": ("flex_olmo", olmoe.read_flex_spec),
    "Gemma2ForCausalLM": ("gemma2", gemma2.read_spec),
    "Gemma3ForCausalLM": ("gemma3_text", gemma3.read_spec),
    "Gemma4ForCausalLM": ("gemma4_text", gemma4.read_spec),
    "GemmaForCausalLM": ("gemma", gemma.read_spec),
    "Glm4ForCausalLM": ("glm4", glm.read_spec_0414),
    "Glm4MoeForCausalLM": ("glm4_moe", glm4_moe.read_spec),
    "Glm4MoeLiteForCausalLM": ("glm4_moe_lite", deepseek.read_glm_lite_spec),
    "GlmForCausalLM": ("glm", glm.read_spec),
    "GlmMoeDsaForCausalLM": ("glm_moe_dsa", deepseek.read_glm_dsa_spec),
    "GPT2LMHeadModel": ("gpt2", gpt2.read_spec),
    "GPTBigCodeForCausalLM": ("gpt_bigcode", gpt_bigcode.read_spec),
    "GPTJForCausalLM": ("gptj", gptj.read_spec),
    "GPTNeoXForCausalLM": ("gpt_neox", gpt_neox.read_spec),
    "GptOssForCausalLM": ("gpt_oss", gpt_oss.read_spec),
    "GraniteForCausalLM": ("granite", granite.read_spec),
    "GraniteMoeForCausalLM": ("granitemoe", granite.read_moe_spec),
    "GraniteMoeHybridForCausalLM": ("granitemoehybrid", granite.read_hybrid_spec),
    "HeliumForCausalLM": ("helium", helium.read_spec),
    "HunYuanDenseV1ForCausalLM": ("hunyuan_v1_dense", hunyuan_v1_dense.read_spec),
    "HunYuanMoEV1ForCausalLM": ("hunyuan_v1_moe", hunyuan_v1_dense.read_moe_spec),
    "Jais2ForCausalLM": ("jais2", nemotron.read_jais2_spec),
    "Lfm2ForCausalLM": ("lfm2", lfm2.read_spec),
    "Lfm2MoeForCausalLM": ("lfm2_moe", lfm2.read_moe_spec),
    "Llama4ForCausalLM": ("llama4_text", llama4.read_spec),
    "LlamaForCausalLM": ("llama", llama.read_spec),
    "Ministral3ForCausalLM": ("ministral3", ministral3.read_spec),
    "MinistralForCausalLM": ("ministral", ministral.read_spec),
    "MiniCPM3ForCausalLM": ("minicpm3", minicpm3.read_spec),
    "MiniMaxM2ForCausalLM": ("minimax_m2", minimax_m2.read_spec),
    "Mistral4ForCausalLM": ("mistral4", mistral4.read_spec),
    "MistralForCausalLM": ("mistral", mistral.read_spec),
    "MixtralForCausalLM": ("mixtral", mixtral.read_spec),
    "NemotronHForCausalLM": ("nemotron_h", nemotron_h.read_spec),
    "NemotronForCausalLM": ("nemotron", nemotron.read_spec),
    "Olmo2ForCausalLM": ("olmo2", olmo2.read_spec),
    "Olmo3ForCausalLM": ("olmo3", olmo3.read_spec),
    "OlmoeForCausalLM": ("olmoe", olmoe.read_spec),
    "OlmoForCausalLM": ("olmo", olmo.read_spec),
    "OPTForCausalLM": ("opt", opt.read_spec),
    "Phi3ForCausalLM": ("phi3", phi3.read_spec),
    "PhiForCausalLM": ("phi", phi.read_spec),
    "PhimoeForCausalLM": ("phimoe", phimoe.read_spec),
    "Qwen2ForCausalLM": ("qwen2", qwen2.read_spec),
    "Qwen2MoeForCausalLM": ("qwen2_moe", qwen2_moe.read_spec),
    "Qwen3_5ForCausalLM": ("qwen3_5_text", qwen3_next.read_dense_spec),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe_text", qwen3_next.read_moe_spec),
    "Qwen3ForCausalLM": ("qwen3", qwen3.read_spec),
    "Qwen3MoeForCausalLM": ("qwen3_moe", qwen3_moe.read_spec),
    "Qwen3NextForCausalLM": ("qwen3_next", qwen3_next.read_spec),
    "SeedOssForCausalLM": ("seed_oss", seed_oss.read_spec),
    "SmolLM3ForCausalLM": ("smollm3", smollm3.read_spec),
    "SolarOpenForCausalLM": ("solar_open", solar_open.read_spec),
    "StableLmForCausalLM": ("stablelm", stablelm.read_spec),
    "Starcoder2ForCausalLM": ("starcoder2", starcoder2.read_spec),
    "VaultGemmaForCausalLM": ("vaultgemma", gemma2.read_vault_spec),
}
ARCHITECTURES = tuple(_DECODERS)
# Of the first conversions, and of the maker's own code.
_OLD_NAMES = {"LLaMAForCausalLM": "LlamaForCausalLM", "PhiMoEForCausalLM": "PhimoeForCausalLM"}
# A decoder may be saved without its language head, and with another one in its place.
_HEADS: dict[str, Callable[[Reader], Reader]] = {
    "Model": without_head,
    "ForSequenceClassification": with_scores,
}
_FAMILIES: dict[str, tuple[str, Reader]] = {
    **_DECODERS,
    **{
        name.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + head: (model_type, change(read))
        for name, (model_type, read) in _DECODERS.items()
        for head, change in _HEADS.items()
    },
    "Gemma3TextModel": ("gemma3_text", without_head(gemma3.read_text_spec)),
    "Gemma3TextForSequenceClassification": ("gemma3_text", with_scores(gemma3.read_text_spec)),
    "Gemma4TextModel": ("gemma4_text", without_head(gemma4.read_spec)),
    "Gemma4TextForSequenceClassification": ("gemma4_text", with_scores(gemma4.read_spec)),
    "Qwen2ForRewardModel": ("qwen2", with_rewards(qwen2.read_spec, num_labels=1)),
    "Qwen2ForProcessRewardModel": ("qwen2", with_rewards(qwen2.read_spec, num_labels=2)),
    **ENCODERS,
}


def read_model_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Describe the model of config.json; ModelError names a key that is missing or unsupported.

    `has_logits` says if the checkpoint has a language head, `pooling` what classifier it has.
    """
    if find_wrapper(config) is not None:
        return with_stored_names(read_model_spec(unwrap(config)))
    architecture = find_family(config)
    if architecture is None:
        raise refuse_architecture(config)
    fields = ConfigFields(config)
    spec = replace(_FAMILIES[architecture][1](fields), architecture=architecture)
    # null is false, as transformers tests it.
    if not fields.boolean("is_causal", "is_causal" not in fields) and spec.is_causal:
        spec = without_mask(fields, spec)
    fields.check_rest(architecture)
    return spec


def find_family(config: Mapping[str, Any]) -> str | None:
    """The architecture of config.json that a family here reads; None where none does."""
    names = config.get("architectures")
    if names is None or names == []:
        model_type = config.get("model_type")
        names = [name for name, (known, _) in _FAMILIES.items() if known == model_type] or [model_type]
    if isinstance(names, list):
        for name in cast(list[Any], names):
            if isinstance(name, str) and (known := _OLD_NAMES.get(name, name)) in _FAMILIES:
                return known
    return None


def describe_families(config: Mapping[str, Any]) -> str:
    """'no family of Quire's own reads ["Phi5ForCausalLM"]; the nearest is Phi3ForCausalLM'; or which does."""
    if (family := find_family(config)) is not None:
        return f"model_impl='quire' reads {family}"
    names: Any = config.get("architectures") or [config.get("model_type")]
    known = {_cut_head(name): name for name in ARCHITECTURES}
    word = _cut_head(str(cast(list[Any], names)[0])) if isinstance(names, list) else ""
    near = difflib.get_close_matches(word, [each for each in known if each[:3] == word[:3]], 1, 0.5)
    nearest = f"; the nearest is {known[near[0]]}" if near else ""
    return f"no family of Quire's own reads {shorten(names)}{nearest}"


def _cut_head(architecture: str) -> str:
    """The name before what says its head: Llama of LlamaForCausalLM, GPT2 of GPT2LMHeadModel."""
    return architecture.partition("For")[0].removesuffix("LMHeadModel")


def refuse_architecture(config: Mapping[str, Any], others: str = "") -> ModelError:
    """What to raise for an architecture that no family here reads; `others` says what would do."""
    names = config.get("architectures")
    names = [config.get("model_type")] if names is None or names == [] else names
    allowed = f"one of {', '.join(ARCHITECTURES)}; of these also ...{' and ...'.join(_HEADS)}"
    encoders = ", ".join(name for name in _FAMILIES if name in ENCODERS or "Reward" in name)
    return ModelError("config.json architectures", names, f"{allowed}; or one of {encoders}{others}")
