"""Arguments and settings of `generate` for which the KV depends on the tokens alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

__all__ = ["reason_to_bypass"]

_NEUTRAL = frozenset(
    {
        # Arguments
        *("attention_mask", "generation_config", "logits_processor", "prefix_allowed_tokens_fn", "stopping_criteria"),
        *("streamer", "tokenizer"),
        # Length
        *("max_length", "max_new_tokens", "max_time", "min_length", "min_new_tokens", "stop_strings"),
        # Choice of the next token
        *("bad_words_ids", "begin_suppress_tokens", "do_sample", "encoder_no_repeat_ngram_size"),
        *("encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty"),
        *("forced_bos_token_id", "forced_eos_token_id", "min_p", "no_repeat_ngram_size", "remove_invalid_values"),
        *("renormalize_logits", "repetition_penalty", "sequence_bias", "suppress_tokens", "temperature", "top_h"),
        *("top_k", "top_p", "typical_p", "watermarking_config"),
        # Special tokens, and the form of the output
        *("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id"),
        *("output_logits", "output_scores", "return_dict_in_generate"),
        # Settings that have no effect in the permitted kinds of generation
        *("assistant_confidence_threshold", "assistant_ensemble_weight", "assistant_lookbehind", "compile_config"),
        *("disable_compile", "early_stopping", "is_assistant", "length_penalty", "max_matching_ngram_size"),
        *("num_assistant_tokens", "num_assistant_tokens_schedule", "target_lookbehind"),
        "transformers_version",
    }
)
"""Names whose values do not change the KV of tokens. Every other name may change it."""

_PLAIN: dict[str, tuple[object, ...]] = {
    "diversity_penalty": (0, 0.0),
    "guidance_scale": (1, 1.0),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "token_healing": (False,),
    "use_cache": (True,),
}
"""Values, besides the default, for which a setting fills one cache of one sequence."""


def reason_to_bypass(input_ids: torch.Tensor, options: Mapping[str, Any], defaults: Any) -> str | None:
    """Returns why `generate` must run without kvtier, or None.

    `options`: keyword arguments of `generate`. `defaults`: the model's generation config. Outputs
    that contain values for each token of the prompt need the computation of the whole prompt.
    """
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or input_ids.shape[0] != 1:
        return "the input is not one sequence of tokens"
    settings = options.get("generation_config") or defaults
    known, usual = vars(settings), _defaults(settings.__class__)
    # `generate` takes the model's value for each setting that has its usual value.
    values = {name: value for name, value in vars(defaults).items() if not name.startswith("_")}
    values |= {
        name: value
        for name, value in known.items()
        if not name.startswith("_") and not (name in values and value == usual.get(name))
    }
    values |= options
    for name, value in values.items():
        if name in _NEUTRAL:
            continue
        if name in options and name not in known:
            return f"of the argument {name}"
        if value is not None and value not in (usual.get(name), *_PLAIN.get(name, ())):
            return f"of the setting {name}={value}"
    return _padding(input_ids, options.get("attention_mask"), values)


@cache
def _defaults(kind: Callable[[], Any]) -> dict[str, Any]:
    return dict(vars(kind()))


def _padding(input_ids: torch.Tensor, mask: Any, values: Mapping[str, Any]) -> str | None:
    """Returns why some tokens are masked, or None. `generate` masks padding if it gets no mask."""
    if mask is not None:
        whole = isinstance(mask, torch.Tensor) and mask.shape == input_ids.shape and bool(mask.all())
        return None if whole else "the attention mask does not select all tokens"
    padding, ends = (_token_ids(values.get(name)) for name in ("pad_token_id", "eos_token_id"))
    if not ends.issuperset(padding) and not padding.isdisjoint(input_ids[0].tolist()):
        return "the input has padding"
    return None


def _token_ids(value: Any) -> set[int]:
    if value is None:
        return set()
    ids = value.tolist() if isinstance(value, torch.Tensor) else value
    return set(ids) if isinstance(ids, list | tuple) else {int(ids)}
