"""A small transformer with random weights, and the three FSDP wrappers around it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817 - its usual name
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from shardsnap.cli.demo.settings import Dtype, Model, Settings, Wrapper

_SEED = 20
_HEAD_SIZE = 32


def make_model(settings: Settings) -> nn.Module:
    """Make the model on the CPU, with the same weights at every call: fp32, tied embeddings, a token per byte."""
    # Here, because it takes seconds, and the process that starts the ranks needs none of it.
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    heads = settings.hidden_size // _HEAD_SIZE
    config_class = {Model.QWEN3: Qwen3Config, Model.LLAMA: LlamaConfig}[settings.model]
    config = config_class(
        vocab_size=256,
        hidden_size=settings.hidden_size,
        intermediate_size=3 * settings.hidden_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=_HEAD_SIZE,
        max_position_embeddings=settings.sequence_bytes,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(_SEED)
    # Eager attention: the same sums in the same order in every forward, on every device.
    make = AutoModelForCausalLM.from_config
    model = make(config, dtype=torch.float32, attn_implementation="eager")  # type: ignore[no-untyped-call]
    assert isinstance(model, nn.Module)
    return model.eval()  # no dropout; training goes through the same code


def wrap(model: nn.Module, wrapper: Wrapper, dtype: Dtype, device: torch.device) -> nn.Module:
    """Shard ``model`` over all ranks: one unit per decoder layer, and the root with what is left."""
    layers: nn.ModuleList = model.model.layers  # type: ignore[union-attr,assignment]
    if wrapper is Wrapper.FSDP2:
        model.to(device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if dtype is Dtype.BF16 else None)
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(layers[0])}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16) if dtype is Dtype.BF16 else None,
        device_id=device,
        use_orig_params=wrapper is Wrapper.FSDP1_ORIGINAL,
    )
