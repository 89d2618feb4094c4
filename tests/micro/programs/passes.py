"""Answers requests for logits of passes over one cache, and for those of transformers with the same weights.

Run by an interpreter that has torch; requests and answers are lines of JSON as the worker's are.
"""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
program = runpy.run_path(str(ROOT / "benchctl" / "micro" / "inside" / "program.py"))

import torch  # noqa: E402

from benchctl.micro.inside.model import ForwardPass, KvCache, Model, PassPoint  # noqa: E402
from benchctl.micro.inside.passes import Passes, count_operators  # noqa: E402
from benchctl.micro.inside.replays import CpuDevice  # noqa: E402


def model_of(shape, dtype="float32", layout="contiguous"):
    settings = {"shape": {"name": "tiny", **shape}, "dtype": dtype, "kv_layout": layout, "seed": 7}
    return Model(settings, torch.device("cpu"))


def tokens_of(model, batch_size, length):
    return torch.randint(model["vocab"], (batch_size, length), generator=torch.Generator().manual_seed(11))


def logits(*, model, batch_size, passes, layout="contiguous", page_tokens=4, cache_seed=0, dtype="float32"):
    """Logits after each of ``passes``, pairs of a phase and the new tokens of each sequence."""
    ours = model_of(model, dtype)
    length = sum(new for _, new in passes)
    pages = {"page_tokens": page_tokens} if layout == "paged" else {}
    cache = KvCache(ours, batch_size, length, seed=cache_seed, **pages)
    tokens, rows, context = tokens_of(model, batch_size, length), [], 0
    for phase, new in passes:
        point = PassPoint(phase=phase, batch_size=batch_size, new_tokens=new, context_tokens=context)
        forward = ForwardPass(ours, cache, point, tokens[:, context : context + new])
        forward.run()
        once = forward.logits.clone()
        forward.run()
        assert torch.equal(once, forward.logits), "a second run of the same pass differs"
        rows.append(once.double().tolist())
        context += new
    return {"logits": rows}


def reference(*, model, family, batch_size, length):
    """Logits at every position by transformers' own model of a family, ``[B][T][V]``."""
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=model["vocab"],
        hidden_size=model["hidden"],
        intermediate_size=model["ffn"],
        num_hidden_layers=model["layers"],
        num_attention_heads=model["q_heads"],
        num_key_value_heads=model["kv_heads"],
        head_dim=model["head_dim"],
        tie_word_embeddings=model["tied_embeddings"],
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        attention_dropout=0.0,
    )
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    theirs.load_state_dict(checkpoint_of(model_of(model)), strict=True)
    answer = theirs(tokens_of(model, batch_size, length)).logits
    return {"logits": answer.double().tolist(), "num_params": sum(p.numel() for p in theirs.parameters())}


def checkpoint_of(weights):
    """The weights as a checkpoint names them, one matrix for each projection."""
    d = weights.dimensions
    heads = (d.q_heads, d.kv_heads, d.kv_heads)
    state = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.final_norm}
    state["lm_head.weight"] = weights.head
    for index, layer in enumerate(weights.layers):
        at = f"model.layers.{index}."
        parts = layer.qkv.split([count * d.head_dim for count in heads])
        for name, part in zip("qkv", parts, strict=True):
            state[f"{at}self_attn.{name}_proj.weight"] = part
        if layer.qkv_bias is not None:
            for name, part in zip("qkv", layer.qkv_bias.split([len(part) for part in parts]), strict=True):
                state[f"{at}self_attn.{name}_proj.bias"] = part
        if layer.head_norms is not None:
            state[f"{at}self_attn.q_norm.weight"] = layer.head_norms[0]
            state[f"{at}self_attn.k_norm.weight"] = layer.head_norms[d.q_heads]
        state[f"{at}self_attn.o_proj.weight"] = layer.output
        gate, up = layer.gate_up.chunk(2)
        state |= {
            f"{at}mlp.gate_proj.weight": gate,
            f"{at}mlp.up_proj.weight": up,
            f"{at}mlp.down_proj.weight": layer.down,
        }
        state[f"{at}input_layernorm.weight"] = layer.attention_norm
        state[f"{at}post_attention_layernorm.weight"] = layer.block_norm
    return state


class CapturingCpu(CpuDevice):
    """A CPU whose graphs are the work itself, or the work over a model that has changed since."""

    def __init__(self, *, is_stale):
        self.is_stale, self.model = is_stale, None

    def capture(self, work, warmups):
        if self.is_stale:
            self.model.head.mul_(1.5)
        return work


def graph_difference(*, model, is_stale, replays):
    """Times of eager and of such a graph, as a worker measures them."""
    device = CapturingCpu(is_stale=is_stale)
    device.model = model_of(model, layout="paged")
    passes, point = Passes(device, device.model), PassPoint("decode", 3, 1, 20)
    return {mode: passes.measure(point, mode, warmups=2, replays=replays) for mode in ("eager", "graph")}


def num_operators(*, model, layout):
    """Operators of a decode."""
    forward = model_of(model, layout=layout).make(PassPoint("decode", 3, 1, 20))
    return {"num_operators": count_operators(forward.run)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.inference_mode():
        operations = {f.__name__: f for f in (logits, reference, graph_difference, num_operators)}
        program["serve"](lambda op, arguments: operations[op](**arguments), sys.stdin, sys.stdout)
