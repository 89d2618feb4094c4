"""Experts as a ``config.json`` describes them.

The same quantity has several names: N is ``n_routed_experts`` (DeepSeek), ``num_experts`` (Qwen, OLMoE) or
``num_local_experts`` (Mixtral, Llama-4); the width of an expert is ``moe_intermediate_size``, or
``intermediate_size`` in models without dense blocks. A layer i has experts unless one of these keys says otherwise:

first_k_dense_replace       i is below it
moe_layer_freq              a number: i is not a multiple (0 is taken as 1); a list: its entry is 0
decoder_sparse_step         i + 1 is not a multiple (Qwen)
interleave_moe_layer_step   i + 1 is not a multiple, or it is 0 (Llama-4)
mlp_only_layers             i is in the list (Qwen)
moe_layers                  i is not in the list (Llama-4)
"""

from benchctl.costs.config_json.keys import ConfigKeys
from benchctl.costs.experts import MoeShape
from benchctl.errors import UsageError

_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")


def moe_shape(config: ConfigKeys) -> MoeShape | None:
    """The experts that a file describes; None for a dense model. Raises UsageError naming the key."""
    experts = config.count(*_EXPERTS)
    layers = _num_layers_with_experts(config) if experts else 0
    if not layers:
        return None
    width = config.positive("moe_intermediate_size", "intermediate_size")
    try:
        return MoeShape(
            layers=layers,
            experts=experts,
            experts_per_token=config.positive(*_EXPERTS_PER_TOKEN),
            expert_ffn=width,
            shared_ffn=_shared_width(config, width),
            groups=config.positive("n_group", absent=1),
            groups_per_token=config.positive("topk_group", absent=1),
            has_shared_gate=config.model_type.startswith("qwen2_moe"),
            has_routing_bias=config.values.get("topk_method") == "noaux_tc",
        )
    except UsageError as error:
        raise error if str(config.path) in str(error) else UsageError(f"{config.path}: {error}") from error


def dense_width(config: ConfigKeys) -> int:
    """Width of the dense blocks, which Llama-4 keeps apart from that of its experts."""
    return config.positive("intermediate_size_mlp", "intermediate_size", "moe_intermediate_size")


def _shared_width(config: ConfigKeys, width: int) -> int:
    """Width of all shared experts together: their number times that of an expert, or a width of their own."""
    if config.model_type.startswith("llama4"):
        return width
    own_width = config.count("shared_expert_intermediate_size", "shared_intermediate_size")
    return own_width or config.count("n_shared_experts") * width


def _num_layers_with_experts(config: ConfigKeys) -> int:
    layers = config.layers()
    with_experts = set(range(config.count("first_k_dense_replace"), layers))
    with_experts &= _by_frequency(config, layers)
    step = config.positive("decoder_sparse_step", absent=1)
    with_experts &= set(range(step - 1, layers, step))
    if (step := config.count("interleave_moe_layer_step", absent=1)) == 0:
        return 0
    with_experts &= set(range(step - 1, layers, step))
    with_experts -= set(config.whole_numbers("mlp_only_layers") or ())
    if (named := config.whole_numbers("moe_layers")) is not None:
        with_experts &= set(named)
    return len(with_experts)


def _by_frequency(config: ConfigKeys, layers: int) -> set[int]:
    if isinstance(config.values.get("moe_layer_freq"), list):
        entries = config.whole_numbers("moe_layer_freq") or []
        if len(entries) != layers:
            raise UsageError(
                f"{config.path}: moe_layer_freq has {len(entries)} entries; it must have one for each of the "
                f"{layers} layers of num_hidden_layers"
            )
        return {layer for layer, entry in enumerate(entries) if entry}
    return set(range(0, layers, config.count("moe_layer_freq", absent=1) or 1))
