"""What a misspelt name may have meant."""

import pytest

from shapes.names import near, unknown

OPS = ["block_scale_gemm", "fused_moe", "mha_prefill", "mla_decode"]


@pytest.mark.parametrize(("name", "meant"), [
    ("mla-decode", ["mla_decode"]), ("MLA_Decode", ["mla_decode"]),  # nothing but the spelling differs
    ("mla_decod", ["mla_decode"]), ("mla", ["mla_decode"]), ("GEMM", ["block_scale_gemm"]),
    ("", []), ("*", []), ("attention", []), ("prefill.*", ["mha_prefill"]),
])  # fmt: skip
def test_a_name_is_near_by_letters_or_as_a_word(name, meant):
    assert near(name, OPS) == meant


def test_at_most_three_are_offered_the_nearest_first():
    known = ["torch.compile", "torch.naive", "torch.sdpa", "torch.sdpa_flash"]
    assert near("torch.sdp", known)[0] == "torch.sdpa"
    assert len(near("torch", known)) == 3


def test_the_line_says_what_is_allowed_where_it_is_short():
    assert unknown("op", "mla", OPS) == f"unknown op 'mla'; did you mean mla_decode? ops: {', '.join(OPS)}"
    assert unknown("boundary", "x", ["core"], of="mla") == "unknown boundary 'x' of mla; boundaries: core"
    many = [f"suite-{number}" for number in range(50)]
    assert unknown("suite", "r2", many, "list suites") == "unknown suite 'r2'; `list suites` shows all"
    assert unknown("suite", "Suite_7", many) == "unknown suite 'Suite_7'; did you mean suite-7?"
    assert unknown("suite", "r2", many).endswith(", suite-49")  # there is nothing else to say
