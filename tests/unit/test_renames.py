"""Names maps: matching, tiles from shards, and refusals that name the tensor."""

from __future__ import annotations

import json
import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from refitd import ParameterMetadata, PlanError, Repeat, Roster, Tile
from refitd.describe.layout import tiles_of
from refitd.describe.module import RankGroups, describe_module
from refitd.describe.renames import rename
from refitd.names import Fused, Padded, Part, megatron_to_hf
from refitd.offline.files import load
from refitd.offline.rosters import place, side_rosters
from refitd.plan.build import plan_copies
from refitd.plan.read_rosters import offered_tensors
from tests.support.fused import interleaved_qkv, without_padding
from tests.support.layouts import meta, refusals, tp
from tests.support.manifests import LAYOUTS

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
}
DEEPSEEK = {
    **LLAMA,
    "model_type": "deepseek_v3",
    "q_lora_rank": 1536,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
}


def renamed(m: ParameterMetadata, names: Any, *, is_target: bool = False) -> ParameterMetadata:
    (found,) = rename([m], names, is_target=is_target)
    return found


def refused(m: ParameterMetadata, names: Any) -> str:
    with pytest.raises(PlanError) as caught:
        rename([m], names, is_target=False)
    (line,) = caught.value.violations
    return line


def test_query_groups_over_ranks_become_tiles_of_q_k_and_v():
    qkv = Fused((Part("q", 12), Part("k", 6), Part("v", 6)), groups=3)
    for rank in range(3):
        m = tp("qkv", (8, 5), range(3))[rank]
        assert renamed(m, {"qkv": qkv}).tiles == interleaved_qkv(("q", "k", "v"), 3, 2, 2, (5,), 3, rank)


def test_ranks_may_cut_inside_a_query_group():
    # 1 group of q0 q1 k0 v0 over TP4, one row each
    qkv = Fused((Part("q", 2), Part("k", 1), Part("v", 1)), groups=1)
    held = [renamed(m, {"qkv": qkv}).tiles for m in tp("qkv", (1, 3), range(4)).values()]
    assert held == [
        (Tile(name, (row, 0), (1, 3), 0, (3, 1)),) for name, row in (("q", 0), ("q", 1), ("k", 0), ("v", 0))
    ]


@pytest.mark.parametrize(("rows", "sizes"), [((6, 6), None), ((6, 2), [3, 1])])
def test_without_groups_each_rank_has_its_share_of_every_part(rows, sizes):
    fc1 = Fused((Part("gate", rows[0]), Part("up", rows[1])))
    found = renamed(tp("fc1", (sum(rows) // 2, 4), range(2))[1], {"fc1": fc1})
    assert found.tiles == (
        Tile("gate", (3, 0), (3, 4), 0, (4, 1)),
        Tile("up", (rows[1] // 2, 0), (rows[1] // 2, 4), 12, (4, 1)),
    )
    assert found.partition_sizes == sizes


def test_a_stack_of_experts_has_one_more_dimension():
    both = "gate_up"
    names = {"fc1.weight{expert}": Fused((Part(both, 2, 0, stack=4), Part(both, 2, 2, stack=4)))}
    found = renamed(meta("fc1.weight3", (4, 5)), names)
    assert found.resolved_name == both and found.global_shape == (4, 4, 5)
    assert "it is expert 4, and names say that gate_up has 4" in refused(meta("fc1.weight4", (4, 5)), names)
    assert [(t.offset, t.size, t.local_offset) for t in found.tiles or ()] == [
        ((3, 0, 0), (1, 2, 5), 0),
        ((3, 2, 0), (1, 2, 5), 10),
    ]


def test_rows_may_become_every_other_column():
    both = "gate_up"
    gate, up = (Part(both, 3, first, 2, 2, is_transposed=True) for first in (0, 1))
    found = renamed(meta("fc1.weight1", (6, 4)), {"fc1.weight{expert}": Fused((gate, up))})
    assert found.global_shape == (2, 4, 6)
    (first, second) = found.tiles or ()
    assert (first.offset, first.size, first.repeat) == ((1, 0, 0), (1, 4, 1), Repeat(2, 3, 2, 4))
    assert (second.offset, second.local_offset, second.local_stride[1:]) == ((1, 0, 1), 12, (1, 4))


@pytest.mark.parametrize("rank", range(4))
def test_padding_is_not_offered_and_a_target_fills_it(rank):
    # a vocabulary of 10 over TP4, padded to 16
    m = tp("embed", (4, 3), range(4))[rank]
    offered = renamed(m, {"embed": Padded("e", 10)})
    assert offered.tiles == tuple(
        Tile("e", t.offset, t.size, t.local_offset, t.local_stride) for t in without_padding(m, (10, 3)).tiles or ()
    )
    assert (offered.global_shape, offered.fill, offered.resolved_name) == ((10, 3), None, "e")
    assert renamed(m, {"embed": Padded("e", 10)}, is_target=True).fill == 0.0


def test_a_plain_name_keeps_what_is_said_of_the_cut():
    m = tp("decoder.layers.7.fc2.weight", (4, 3), range(2), dim=1)[0]
    found = renamed(m, {"decoder.layers.{layer}.{rest}": "layers.{layer}.mlp.{rest}"})
    assert (found.resolved_name, found.tiles, found.is_tp) == ("layers.7.mlp.fc2.weight", None, True)


def test_aliases_are_renamed_too():
    m = meta("embed", (4, 2), aliases=("head",))
    assert renamed(m, {"embed": Padded("e", 3), "head": Padded("h", 3)}).aliases == ("h",)
    fused = {"embed": "e", "head": Fused((Part("a", 2), Part("b", 2)))}
    assert "embed: it is tied to head, which names say is fused" in refused(m, fused)


def test_local_experts_of_a_dict_are_found_by_the_canonical_name():
    m = meta("experts.local_experts.2.linear_fc2.weight", (4, 2))
    assert renamed(m, {"experts.linear_fc2.weight{expert}": "x.{expert}"}).resolved_name == "x.2"


def test_an_unknown_tensor_is_refused_with_the_nearest_names():
    names = megatron_to_hf(LLAMA)
    line = refused(meta("decoder.layers.3.self_attention.linear_qvk.weight", (4, 4)), names)
    assert "no rule of names matches decoder.layers.3.self_attention.linear_qvk.weight" in line
    close = line.partition("nearest: ")[2].partition(";")[0].split(", ")
    assert close[0] == "decoder.layers.3.self_attention.linear_qkv.weight" and len(close) == 5


def test_all_refused_tensors_are_named_together():
    with pytest.raises(PlanError) as caught:
        rename([meta("a", (1,)), meta("embed", (9, 1)), meta("b", (1,))], {"embed": Padded("e", 10)}, is_target=False)
    assert [line.partition(":")[0] for line in caught.value.violations] == ["a", "embed", "b"]


@pytest.mark.parametrize(
    ("m", "says"),
    [
        (meta("fc1", (10, 4)), "it has 10 rows in the whole model, expected 12 (6 of gate + 6 of up)"),
        (tp("fc1", (12, 4), range(2))[0], "it has 24 rows in the whole model, expected 12"),
        (tp("fc1", (12, 2), range(2), dim=1)[0], ""),
        (meta("fc1", ()), "it has no rows"),
        (meta("embed", (9, 4)), "it has 9 rows in the whole model, expected 10 or more for e"),
        (meta("square", (6,)), "it has 1 dimensions, and names say that it is a transposed matrix"),
        (
            meta("experts.weight1", (2, 2), tiles=(Tile("fc1", (11, 0), (2, 2), 0, (2, 1)),)),
            "it holds rows of fc1 beyond the 12",
        ),
    ],
)
def test_a_tensor_that_is_not_what_its_rule_says_is_refused(m, says):
    names = {
        "fc1": Fused((Part("gate", 6), Part("up", 6))),
        "embed": Padded("e", 10),
        "square": Fused((Part("s", 6, is_transposed=True),)),
    }
    if says:
        assert says in refused(m, names)
    else:
        assert renamed(m, names).tiles


def test_two_tensors_of_a_source_under_one_name_are_refused():
    """A rank sends one of two tensors with equal elements, so the loss of the other would not be detected."""
    names = {"l.{layer}.norm": "norm", "e": Padded("norm", 2), "x": "norm"}
    both = [meta("l.0.norm", (3,)), meta("l.1.norm", (3,))]
    with pytest.raises(PlanError, match=r"l\.1\.norm: names give norm to l.0.norm and to l.1.norm; give each its own"):
        rename(both, names, is_target=False)
    with pytest.raises(PlanError, match="e: names give norm to x and to e"):
        rename([meta("x", (3,)), meta("e", (3,))], names, is_target=False)
    assert len(rename(both, names, is_target=True)) == 2  # an engine may hold it twice
    held_twice = [meta("l.0.norm", (3,)), meta("other", (3,), resolved_name="l.0.norm")]
    assert len(rename(held_twice, names, is_target=False)) == 2


@pytest.mark.parametrize(
    ("one", "other", "meets"),
    [
        ("q", Fused((Part("q", 4), Part("k", 2))), True),
        (Padded("k", 4), Fused((Part("q", 4), Part("k", 2))), True),
        (Fused((Part("q", 6),)), Fused((Part("k", 2), Part("q", 4, first=5))), True),
        (Fused((Part("q", 6),)), Fused((Part("k", 2), Part("q", 4, first=6))), False),
        (Fused((Part("q", 6, step=2),)), Fused((Part("q", 6, first=1, step=2),)), False),
        (Fused((Part("q", 6, step=2),)), Fused((Part("q", 6, first=3, step=3),)), True),
        (Fused((Part("q", 6),)), Fused((Part("q", 6, is_transposed=True),)), True),
    ],
)
def test_two_tensors_of_a_source_that_give_the_same_rows_are_refused(one: Any, other: Any, meets: bool) -> None:
    names, both = {"a": one, "b": other}, [meta("a", (6, 8)), meta("b", (6, 8))]
    if meets:
        with pytest.raises(PlanError, match=r"b: names give rows of [qk] to a and to b; give each its own"):
            rename(both, names, is_target=False)
    else:
        assert len(rename(both, names, is_target=False)) == 2


@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize(
    "names",
    [
        {"l{n}.gate": Part("l{n}.w", 4), "l{n}.up": Part("l{n}.w", 8, first=4)},
        {"l{n}.gate": Part("l{n}.w", 4, whole=12), "l{n}.{rest}": Fused((Part("l{n}.w", 8, first=4),))},
    ],
)
def test_two_tensors_may_be_rows_of_one_canonical_tensor(names: Any, ways: int) -> None:
    """Either side may have the halves: l0.gate and l0.up, over one or two ranks, are l0.w of the other side."""
    halves: dict[int, Any] = {}
    for rank in range(ways):
        both = [tp(name, (rows // ways, 5), range(ways))[rank] for name, rows in (("l0.gate", 4), ("l0.up", 8))]
        halves[rank] = both
        for is_target in (False, True):
            found = rename(both, names, is_target=is_target)
            assert {m.resolved_name for m in found} == {"l0.w"} and {m.global_shape for m in found} == {(12, 5)}
            assert [t.offset[0] for m in found for t in tiles_of(m)] == [rank * 4 // ways, 4 + rank * 8 // ways]
    whole = [meta("l0.w", (12, 5))]
    for is_source in (True, False):
        renamed_halves = {rank: rename(both, names, is_target=not is_source) for rank, both in halves.items()}
        if is_source:
            rosters = [Roster(rank, source=tuple(found)) for rank, found in renamed_halves.items()]
            rosters.append(Roster(9, destination=tuple(whole)))
        else:
            rosters = [Roster(rank, destination=tuple(found)) for rank, found in renamed_halves.items()]
            rosters.append(Roster(9, source=tuple(whole)))
        assert plan_copies(rosters).table.total_bytes == 12 * 5 * 2


def test_halves_that_are_named_whole_are_refused_with_the_way_to_write_them() -> None:
    both = [meta("gate", (4, 5)), meta("up", (4, 5))]
    with pytest.raises(PlanError, match=r"say which: 'gate': Part\('w', rows=N\), 'up': Part\('w', rows=M, first=N\)"):
        rename(both, {"gate": "w", "up": "w"}, is_target=False)


def test_rules_for_layers_of_two_sizes_do_not_make_one_tensor_larger() -> None:
    names = {"dense{n}": Fused((Part("w{n}", 8), Part("v{n}", 8))), "moe{n}": Fused((Part("w{n}", 2), Part("v{n}", 2)))}
    (found,) = rename([meta("moe1", (4, 5))], names, is_target=False)
    assert {tile.tensor: tile.size for tile in tiles_of(found)} == {"w1": (2, 5), "v1": (2, 5)}


def test_experts_of_one_stack_are_given_by_tensors_of_their_own() -> None:
    names = {"e{expert}.w": Fused((Part("w", 6, stack=4),)), "x{expert}.w": Fused((Part("w", 6, stack=4),))}
    assert len(rename([meta(f"e{expert}.w", (6, 8)) for expert in range(4)], names, is_target=False)) == 4
    with pytest.raises(PlanError, match=r"x1.w: names give rows of w to e1.w and to x1.w"):
        rename([meta("e0.w", (6, 8)), meta("e1.w", (6, 8)), meta("x1.w", (6, 8))], names, is_target=False)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["a"], "expected {pattern: canonical name, Part, Fused or Padded}"),
        ({"": "a"}, "expected a pattern of names"),
        ({3: "a"}, "has the key 3 (int), expected a pattern of names"),
        ({"a": 3}, "is 3 (int), expected a canonical name, Part, Fused or Padded"),
        ({"a.{layer}.{layer}": "b"}, "has a placeholder twice"),
        ({"a.{layer}": "b.{expert}"}, "has no {expert}"),
        ({"a": Fused(())}, "expected parts"),
        ({"a": Fused((Part("b", 3),), groups=2)}, "expected parts with rows that the groups divide"),
        ({"a": Part("b", 3, first=1, whole=3)}, "b has 3 rows (whole), and names rows of it up to 4"),
        ({"a": Padded("b", 0)}, "expected 1 row or more"),
        (
            {"{rest}": "{rest}", "a": "b"},
            "names['a'] comes after '{rest}', which matches every name; put '{rest}' last",
        ),
        ({"a": Fused((Part("b", 2), Part("c", 1), Part("b", 2, first=1)))}, "takes rows of b twice"),
        ({"a": Fused((Part("b", 3, stack=2),))}, "stacks experts, and the pattern has no {expert}"),
    ],
)
def test_a_wrong_map_is_refused(names, says):
    with pytest.raises(PlanError) as caught:
        rename([meta("a", (3,))], names, is_target=False)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {**LLAMA, "model_type": "lama"},
            "'lama' (str): its names in Megatron-Core are not known; known: llama, qwen2",
        ),
        ({"architectures": ["Qwen4ForCausalLM"]}, "nearest: Qwen3ForCausalLM"),
        ({**LLAMA, "num_attention_heads": None, "num_key_value_heads": None}, "it has no num_attention_heads"),
        ({**LLAMA, "vocab_size": "many"}, "vocab_size is 'many' (str), expected a whole number"),
        (None, "are not known"),
    ],
)
def test_an_unknown_architecture_or_a_missing_number_is_refused(config, says):
    with pytest.raises(PlanError) as caught:
        megatron_to_hf(config)
    assert says in str(caught.value)


def test_a_config_may_be_an_object_or_read_from_json():
    assert megatron_to_hf(SimpleNamespace(**LLAMA)) == megatron_to_hf(json.loads(json.dumps(LLAMA)))


def test_biases_and_norms_that_the_config_lacks_have_no_rules():
    m = meta("decoder.layers.0.self_attention.linear_qkv.bias", (10240,))
    assert "no rule of names matches" in refused(m, megatron_to_hf(LLAMA))
    assert renamed(m, megatron_to_hf({**LLAMA, "attention_bias": True})).tiles
    norm = meta("decoder.layers.0.self_attention.q_layernorm.weight", (128,))
    assert "no rule" in refused(norm, megatron_to_hf({**LLAMA, "model_type": "qwen2"}))
    assert renamed(norm, megatron_to_hf({**LLAMA, "model_type": "qwen3"})).resolved_name


@pytest.mark.parametrize(
    ("layout", "config", "ranks"),
    [("llama-3-70b-train-tp8-pp4", LLAMA, (3, 29)), ("qwen3-235b-a22b-train-tp4-pp4-ep32", QWEN3_MOE, (5, 127))],
)
def test_names_agree_with_the_example_manifests(layout, config, ranks):
    """The manifests in configs/ and these rules, written independently, agree."""
    manifest = load(LAYOUTS / f"{layout}.toml")
    (placed,) = place([manifest])
    rosters = list(side_rosters(placed, "source"))
    for rank in ranks:
        said = rosters[rank].source
        cut = [as_megatron_cuts(m, rank, manifest.tp, manifest.etp) for m in said]
        for m, found in zip(said, rename(cut, megatron_to_hf(config), is_target=False), strict=True):
            assert sorted(map(repr, tiles_of(found))) == sorted(map(repr, tiles_of(m))), m.name


def as_megatron_cuts(m: ParameterMetadata, rank: int, tp_size: int, etp_size: int) -> ParameterMetadata:
    """Describe a manifest's tensor by Megatron's attributes instead of tiles."""
    ways = etp_size if ".experts." in m.name else tp_size
    is_whole = ways == 1 or m.name.endswith(("norm.weight", "norm_weight", "router.weight"))
    return ParameterMetadata(
        m.name,
        m.shape,
        m.dtype,
        m.element_size,
        is_tp=not is_whole,
        partition_dim=int("linear_proj" in m.name or "linear_fc2" in m.name),
        owner_rank=rank % ways,
        tensor_parallel_group_ranks=None if is_whole else list(range(ways)),
    )


def test_latent_attention_and_shared_experts_have_names():
    names = megatron_to_hf(DEEPSEEK)
    at = "decoder.layers.5"
    for ours, theirs in {
        "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
        "self_attention.linear_q_up_proj.layer_norm_weight": "self_attn.q_a_layernorm.weight",
        "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
        "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
        "mlp.shared_experts.linear_fc2.weight": "mlp.shared_experts.down_proj.weight",
        "mlp.experts.linear_fc2.weight9": "mlp.experts.9.down_proj.weight",
    }.items():
        assert renamed(meta(f"{at}.{ours}", (4, 4)), names).resolved_name == f"model.layers.5.{theirs}"
    # without q_lora_rank there is one projection
    assert f"{'decoder.layers.{layer}'}.self_attention.linear_q_proj.weight" in megatron_to_hf(
        {**DEEPSEEK, "q_lora_rank": None}
    )


class Layer(nn.Module):
    """A layer of a module like Megatron's: a GroupedMLP over EP2, ETP2, and sinks."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number
        self.mlp = nn.Module()
        self.mlp.experts = nn.Module()
        self.mlp.experts.num_local_experts = 2
        self.mlp.experts.weight1 = stamped(torch.zeros(8, 2 * 2 * 3), 1)
        self.mlp.experts.weight2 = stamped(torch.zeros(2 * 3, 8), 0)
        self.self_attention = nn.Module()
        self.self_attention.core_attention = nn.Module()
        self.self_attention.core_attention.softmax_offset = nn.Parameter(torch.zeros(2))


def stamped(tensor: torch.Tensor, dim: int) -> nn.Parameter:
    found: Any = nn.Parameter(tensor)
    found.tensor_model_parallel, found.partition_dim, found.partition_stride, found.allreduce = True, dim, 1, False
    return found


class Model(nn.Module):
    """The second of two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            num_moe_experts=4, gated_linear_unit=True, moe_ffn_hidden_size=6, num_attention_heads=4
        )
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList([Layer(2)])


@pytest.mark.parametrize("fused", [False, True])
def test_a_grouped_mlp_and_sinks_get_names_by_layer_and_expert(fused):
    config = {"model_type": "gpt_oss" if fused else "qwen3_moe", "vocab_size": 3, "hidden_size": 8, "head_dim": 2}
    config |= {"num_attention_heads": 4, "intermediate_size": 6, "moe_intermediate_size": 6, "num_local_experts": 4}
    names = {**megatron_to_hf({**config, "num_experts": 4}), "{rest}.softmax_offset": "{rest}.sinks"}
    offered = []
    for rank in range(4):
        group = [rank - rank % 2, rank - rank % 2 + 1]
        groups = RankGroups(tp=group, expt_tp=group, ep=[rank % 2, rank % 2 + 2])
        offered.append(Roster(rank, source=rename(describe_module(Model(), rank, groups), names, is_target=False)))
    found = offered_tensors(offered)
    sinks = "model.layers.1.self_attn.sinks" if fused else "decoder.layers.1.self_attention.core_attention.sinks"
    assert found.pop(sinks)[0] == (4,)
    at = "model.layers.1.mlp.experts"
    want = {
        f"{at}.{e}.{n}_proj.weight": (8, 6) if n == "down" else (6, 8) for e in range(4) for n in ("gate", "up", "down")
    }
    stacked = {f"{at}.gate_up_proj": (4, 8, 12), f"{at}.down_proj": (4, 6, 8)}
    assert {name: shape for name, (shape, _) in found.items()} == (stacked if fused else want)
    everything = [meta(name, shape, 9, dtype="float32", element_size=4) for name, shape in want.items()]
    if not fused:
        assert len(plan_copies([*offered, Roster(9, destination=everything)]).table)
        missing = [line for line in refusals([*offered[:2], Roster(9, destination=everything)])]
        assert any(f"{at}.3.up_proj.weight" in line for line in missing)
        assert np.prod(found[f"{at}.3.up_proj.weight"][0]) == 48


def test_thousands_of_tiles_in_one_tensor_plan_in_little_memory():
    config = {"model_type": "gpt_oss", "vocab_size": 3, "hidden_size": 8, "head_dim": 2, "num_attention_heads": 4}
    names = megatron_to_hf({**config, "intermediate_size": 512, "num_local_experts": 4})
    held = [meta(f"decoder.layers.0.mlp.experts.linear_fc1.weight{e}", (1024, 8), 0) for e in range(4)]
    engine = [meta("model.layers.0.mlp.experts.gate_up_proj", (4, 8, 1024), 1)]
    tracemalloc.start()
    plan = plan_copies([Roster(0, source=rename(held, names, is_target=False)), Roster(1, destination=engine)])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(plan.table)
    assert peak < 30e6  # bytes; comparing every place with every tile took 660e6
