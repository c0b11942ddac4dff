"""Kernels' names, as the libraries have them, and the classes that they belong to; annotations of steps."""

import re

import pytest

from harness.serving.trace import classify
from tests.support.paths import SERVING_DATA
from tests.support.traces import MM

TEXT = (SERVING_DATA / "traces" / "kernel_names.txt").read_text()
NAMES = {one.splitlines()[0]: one.splitlines()[1:] for one in re.split(r"^(?=\w)", TEXT, flags=re.M)[1:]}


@pytest.mark.parametrize("op_class", NAMES)
def test_names_of_a_class(op_class):
    names = [name.strip() for name in NAMES[op_class]]
    launchers = {name: name if "::" in name and "(" not in name else "" for name in names}
    of = {name: classify.rule_of(name, launcher).op_class for name, launcher in launchers.items()}
    assert of == dict.fromkeys(names, op_class)
    assert classify.rule_of("", "").op_class == "unknown"


def test_no_rule_fits_anything_and_a_product_that_bmm_launched_is_the_absorbed_one():
    assert not [rule for rule in classify.kernel_rules() if rule.name_pattern.search("") or not rule.library]
    assert classify.rule_of(MM, "aten::bmm").op_class == "absorbed_bmm"
    assert classify.rule_of(MM, "aten::mm").op_class == "bf16_gemm"


@pytest.mark.parametrize(("annotation", "phase"), [
    ("execute_context_1(2)_generation_0(0)", "prefill"),
    ("execute_context_0(0)_generation_31(31)", "decode"),
    ("execute_context_2(512)_generation_30(30)", "mixed"),
    ("execute_context_0(0)_generation_0(0)", "other"),
    ("execute_8192_context_9(sq8155sk8430sqsq7475785)_generation_37(sq37sk34489)", "mixed"),
    ("execute_context_1(888_788544)_generation_0(0)", "prefill"),
    ("step[EXTEND bs=15 toks=15360]", "prefill"),
    ("step[DECODE bs=64]", "decode"),
    ("step[DREAM bs=64]", "other"),
    ("step[TARGET_VERIFY bs=4]", "decode"),
    ("step[MIXED bs=5 c=2 g=3]", "mixed"),
    ("prefill[bs=2 tok=14721 ctx=[7803, 6918]]", "prefill"),
    ("decode[bs=117/128 tok=117 d=117]", "decode"),
    ("[Executor] _forward_step 12: 0 ctx reqs, 0 ctx tkns, 8 gen reqs", "decode"),
    ("[Executor] _forward_step: 1 ctx reqs, 8 gen reqs", "mixed"),
    ("execute_new_1_cached_3", None),
    ("ProfilerStep#3", None),
])  # fmt: skip
def test_annotations(annotation, phase):
    assert classify.step_rule(annotation)
    assert classify.annotated_phase(annotation) == phase
    other = ("attn(F)", "nccl:all_reduce", "gpu_model_runner: forward", "## Call x ##")
    assert not any(map(classify.step_rule, other))


@pytest.mark.parametrize(("op_class", "phase", "latent", "found"), [
    ("attention", "decode", False, "mha_decode"), ("attention", "decode", True, "mla_decode"),
    ("attention", "prefill", True, "mha_prefill"), ("attention", "mixed", True, "attention"),
    (classify.DECODE_ATTENTION, "mixed", True, "mla_decode"), ("norm", "decode", True, "norm"),
])  # fmt: skip
def test_attention_for_both_is_told_by_the_step_and_the_model(op_class, phase, latent, found):
    assert classify.attention_class(op_class, phase, latent) == found
