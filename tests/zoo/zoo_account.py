"""Which model types of the installed transformers the zoo has, and why not the others.

`python tests zoo --families` writes recipes/guides/model_types.md. What can be found out is found out when it runs:
models are built on the meta device, from small configurations. The rest is in REASONS and OPEN.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from hf_bmtrain.engine.wrap.find import find_block_lists
from zoo_families import FAMILIES
from zoo_tiny import tiny

PAGE = Path(__file__).resolve().parents[2] / "recipes" / "guides" / "model_types.md"
REASONS = {
    "auto_wrap refuses reversible layers, which compute outside their forward": "reformer",
    "its forward takes an inference session that holds a video": (
        "edgetam_video sam2_video sam3_tracker_video sam3_video"
    ),
    "its parts are in the zoo; the default configuration builds no model": (
        "cohere_compass diffusion_gemma granite4_vision hunyuan_vl"
    ),
    "its layers are in the zoo; the module between its parts, a list of one or two, is not": (
        "minicpm_ocr minicpmv4_6 minicpmv4_7 molmo2"
    ),
}
"""Why model types are not in the zoo, where no program can tell."""
OPEN = {
    "its other sizes have to be made small by hand: over four million parameters": (
        "blt chmv2 deepseek_ocr2_sam_vision_model deepseek_ocr2_vision deimv2 depth_pro emu3_vqgan"
        " fastspeech2_conformer_with_hifigan neucodec pe_audio pe_audio_encoder pocket_tts_audio_tokenizer"
        " pocket_tts_audio_tokenizer_decoder pocket_tts_audio_tokenizer_encoder pp_doclayout_v4 pp_formulanet"
        " pp_formulanet_vision pp_lcnet_v3 pp_ocrv5_server_rec qwen2_5_omni qwen2_5_omni_bigvgan"
        " qwen2_5_omni_token2wav tvp univnet unlimited_ocr unlimited_ocr_sam_vision_model unlimited_ocr_vision"
        " uvdoc uvdoc_backbone vibevoice vibevoice_acoustic_tokenizer vibevoice_acoustic_tokenizer_decoder"
        " vibevoice_acoustic_tokenizer_encoder vibevoice_asr vits xcodec xcodec2"
    ),
    "its small configuration has to be written by hand: sizes that must fit each other": (
        "clap clap_audio_model d_fine deepseek_ocr2 efficientloftr emu3 ernie4_5_vl_moe ernie4_5_vl_moe_text esmfold2"
        " fun_asr_nano gemma4_assistant gemma4_unified_assistant grounding-dino inkling2 kimi_k25 kimi_k25_vision"
        " lw_detr lw_detr_vit mm-grounding-dino molmo2_vision nemotron3_5_asr nemotron_asr_streaming"
        " nemotron_asr_streaming_encoder phi4_multimodal phi4_multimodal_audio pp_doclayout_v2 pp_doclayout_v3"
        " pp_ocrv5_mobile_det pp_ocrv5_mobile_rec pp_ocrv5_server_det pp_ocrv6_medium_det pp_ocrv6_small_det"
        " prompt_depth_anything qwen3_omni_moe qwen3_omni_moe_talker_text qwen4_exp qwen4_exp_text sam2 sam3_tracker"
        " sapiens2 superpoint t5gemma2 t5gemma2_decoder t5gemma2_encoder t5gemma2_text tipsv2_dpt vitmatte xlstm"
        " zoedepth"
    ),
    "its batches have to be written by hand: inputs of several kinds": (
        "blt_local_decoder blt_local_encoder clvp deepseek_ocr2_encoder dots3_note dots3_note_audio_encoder evolla"
        " EvollaModel fastspeech2_conformer fun_asr_nano_encoder inkling2_vision lightglue muse_glimmer_assistant"
        " omdet-turbo oneformer qwen2_5_omni_dit sam3 sam3_detr_decoder sam3_lite_text sam3_lite_text_detr_decoder"
        " sam3_lite_text_detr_encoder slanet superglue unlimited_ocr_vision_encoder"
    ),
}
"""Model types that could be in the zoo and are not yet, by what is missing."""
KINDS = {
    "zoo": "in the zoo",
    "part": "parts of models in the zoo",
    "alias": "aliases of those",
    "blocks": "whose layers are all in the zoo",
    "none": "without a model",
    "flat": "without a list of layers",
    "package": "that need a package",
    "explained": "left out for a reason",
    "open": "that could be added",
    "unexplained": "unexplained",
}
"""The kinds of answers, as the summary line counts them."""


@dataclass
class Zoo:
    """What the zoo's models contain. types, parts: model types, with a family that has it; layers: classes."""

    types: dict[str, str] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    layers: set[type] = field(default_factory=set)


def account() -> dict[str, tuple[str, str]]:
    """By model type of the installed transformers, the kind of answer (see KINDS) and its details."""
    zoo = read_zoo()
    return {name: explain(name, zoo) for name in transformers.CONFIG_MAPPING}


def read_zoo() -> Zoo:
    zoo = Zoo()
    for family in FAMILIES.values():
        if family.missing:
            continue
        with torch.device("meta"):
            model = family.build()
        zoo.types.setdefault(type(model.config).model_type, family.name)
        for part in model.modules():
            if isinstance(part, transformers.PreTrainedModel):
                zoo.parts.setdefault(type(part.config).model_type, family.name)
        zoo.layers |= layers_of(model)
    return zoo


def layers_of(model: torch.nn.Module) -> set[type]:
    """The classes of the blocks that `auto_wrap` would make, without those of torch."""
    classes = {type(block) for blocks in find_block_lists(model) for block in blocks}
    return {cls for cls in classes if not cls.__module__.startswith("torch.")}


def explain(name: str, zoo: Zoo) -> tuple[str, str]:
    if name in zoo.types:
        return "zoo", zoo.types[name]
    if name in zoo.parts:
        return "part", f"part of {zoo.parts[name]}"
    config = transformers.CONFIG_MAPPING[name]
    try:
        models = model_classes(name)
    except ImportError as error:
        return "package", needed_package(error)
    if not models:
        return "none", "no model has this configuration"
    used = {config.model_type, *(cls.config_class.model_type for cls in models if cls.config_class is not config)}
    if config.model_type != name or all(cls.config_class is not config for cls in models):
        for other in used & zoo.types.keys():
            return "alias", f"{other}'s models"
    return explain_models(name, config, models, zoo)


def explain_models(name: str, config: Any, models: list[Any], zoo: Zoo) -> tuple[str, str]:
    layers: set[type] = set()
    errors: list[Exception] = []
    for cls in models:
        try:
            layers |= layers_of(build(cls, config))
        except Exception as error:
            errors.append(error)
    others = sorted(cls.__name__ for cls in layers - zoo.layers)
    if layers and not others:
        return "blocks", ", ".join(sorted(cls.__name__ for cls in layers))
    for error in errors:
        if isinstance(error, ImportError) and not others:
            return "package", needed_package(error)
    for kind, reasons in (("explained", REASONS), ("open", OPEN)):
        for reason, names in reasons.items():
            if name in names.split():
                return kind, reason
    if not layers and not errors:
        return "flat", "no ModuleList of layers"
    return "unexplained", ", ".join(others) or f"{type(errors[0]).__name__}: {str(errors[0]).strip().splitlines()[0]}"


def build(cls: Any, config: Any) -> Any:
    """A model on the meta device, from a small configuration if there is one, from the default one otherwise."""
    with torch.device("meta"):
        try:
            return cls(tiny(config))
        except ImportError:
            raise
        except Exception:  # sizes that do not go together; errors of the default one are raised
            return cls(config())


@cache
def auto_names() -> dict[str, list[str]]:
    """By model type, the classes that transformers' auto classes would make."""
    names: dict[str, list[str]] = {}
    for mapping, classes in vars(modeling_auto).items():
        if re.fullmatch("MODEL_.*MAPPING_NAMES", mapping):
            for name, found in classes.items():
                names.setdefault(name, []).extend([found] if isinstance(found, str) else found)
    return {name: list(dict.fromkeys(found)) for name, found in names.items()}


def model_classes(name: str) -> list[Any]:
    """The models of a type: those of the auto classes, and others in its folder with its configuration."""
    config = transformers.CONFIG_MAPPING[name]
    package = importlib.import_module(config.__module__.rpartition(".")[0])
    found = [getattr(transformers, each) for each in auto_names().get(name, []) if hasattr(transformers, each)]
    for info in pkgutil.iter_modules(package.__path__):
        if info.name.startswith("modeling_"):
            module = importlib.import_module(f"{package.__name__}.{info.name}")
            found += [cls for cls in vars(module).values() if is_model(cls) and cls.config_class is config]
    return list(dict.fromkeys(found))


def is_model(value: Any) -> bool:
    return (
        inspect.isclass(value)
        and issubclass(value, transformers.PreTrainedModel)
        and not value.__name__.endswith("PreTrainedModel")
    )


def needed_package(error: ImportError) -> str:
    """From "X requires the timm library but it was not found" or "No module named 'scipy'"."""
    match = re.search(r"requires the (\S+) library|No module named '([^']+)'", str(error))
    return f"needs {match[1] or match[2]}" if match else str(error).strip().splitlines()[0]


def summary(answers: dict[str, tuple[str, str]]) -> str:
    counts = Counter(kind for kind, _ in answers.values())
    return f"{len(answers)} model types: " + ", ".join(f"{counts[kind]} {text}" for kind, text in KINDS.items())


def tell_account() -> int:
    """Print the table, write it to model_types.md, and return 1 if a type is unexplained."""
    transformers.utils.logging.set_verbosity_error()
    answers = account()
    rows = [f"| {name} | {kind} | {details} |" for name, (kind, details) in answers.items()]
    text = f"""# Model types of transformers {transformers.__version__}

Which model types have been compared with plain PyTorch ([families](families.md), the *zoo*), and why not the others.
`auto_wrap` does not need this list: a type that is not in the zoo may work as well.

{summary(answers)}.

`python tests zoo --families` wrote this page.

| type | kind | details |
|---|---|---|
"""
    print("\n".join([*rows, summary(answers)]))
    PAGE.write_text(text + "\n".join(rows) + "\n")
    return int(any(kind == "unexplained" for kind, _ in answers.values()))


def read_account() -> tuple[str, dict[str, tuple[str, str]]]:
    """The version of transformers and the answers in model_types.md."""
    text = PAGE.read_text()
    version = re.search(r"^# Model types of transformers (\S+)$", text, re.MULTILINE)
    assert version is not None
    rows = re.findall(r"^\| ([^|]+) \| (\w+) \| ([^|]*) \|$", text, re.MULTILINE)
    return version[1], {name: (kind, details) for name, kind, details in rows if name != "type"}
