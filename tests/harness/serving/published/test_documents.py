"""The published documents as data: each id stands alone, and what a run leaves out is its configuration's."""

import hashlib
import json

import pytest
from pydantic import ValidationError

from harness.catalogue import recipes
from harness.errors import UsageError
from harness.serving.compare.alike import published_runs
from harness.serving.published_documents import FOLDER, commands_of, documents, flags_of

DOCUMENTS = documents()
RUNS = {run.id: run for one in DOCUMENTS for run in one.runs}


def test_ids_stand_once_and_claims_refer_to_what_is_there():
    every = [*DOCUMENTS, *documents(FOLDER / "others")]
    claims = [claim for one in DOCUMENTS for claim in one.claims]
    names = [each.name for one in every for each in one.configurations]
    ids = [run.id for one in every for run in one.runs] + [claim["id"] for claim in claims]
    assert len(names) == len({*names}) > 9 and len(ids) == len({*ids}) > 90
    known = {*published_runs(), *ids, *names, ""}
    referred = {r for claim in claims for r in (*claim.get("refers_to", ()), claim.get("configuration", ""))}
    assert {name for name in referred - known if not name.startswith(("claims:", "dstack."))} == set()


def test_a_run_has_what_its_configuration_says():
    run = RUNS["moai-512-512-sharegpt"]
    assert (run.gpus, run.nodes, run.image.rpartition(":")[2]) == (40, 5, "vllm_251212")
    assert (run.parallelism.prefill_gpus, run.parallelism.decode_gpus) == (16, 24)
    assert "--quantization ds_fp8_per_token" in run.flags
    assert "prefill: --max-num-batched-token 64000" in run.flags
    of_roles = [recipes.find(f"moai-{role}").environment.items() for role in ("prefill", "decode")]
    assert run.environment.items() == of_roles[0] & of_roles[1] != of_roles[0]
    assert RUNS["mi350x-vllm-c1"].environment == recipes.find("mi350x-vllm").environment


SMALL = {
    "id": "small", "title": "A small one", "publisher": "nobody",
    "sha256": hashlib.sha256(b"a text").hexdigest(),
    "configurations": [
        {"name": "c", "hardware": "H200", "engine": "vllm", "server": ["vllm serve m \\", "  --tp 8 &"]}
    ],
    "runs": [{"id": "r", "client": "document.table", "source": "Table 1", "configuration": "c"}],
    "claims": [{"id": "k", "quote": "9 tok/s", "where": "head", "kind": "claim", "refers_to": ["r"]}],
}  # fmt: skip


def kept(folder, **changes):
    (folder / "small.json").write_text(json.dumps(SMALL | changes))
    return folder


def test_a_broken_document_does_not_load(tmp_path):
    for wrong in ({"title": 5}, {"sha256": None}, {"surplus": 1}, {"configurations": [{"name": "c"}]}):
        says = "hardware" if "configurations" in wrong else next(iter(wrong))
        with pytest.raises(ValidationError, match=says):
            documents(kept(tmp_path, **wrong))
    (tmp_path / "small.json").write_text("{")
    with pytest.raises(UsageError, match=r"cannot read .*small\.json"):
        documents(tmp_path)


def test_flags_are_those_of_the_last_command_and_a_tasks_commands_join_what_yaml_folds():
    text = "pip install x --pre\nserve m --a -1 more --c '{\"d\": 1}' \\\n  --b & # --e"
    assert flags_of(text) == ("--a -1", '--c {"d": 1}', "--b")
    task = "type: task\ncommands:\n  - cd a\n  - build \n        --x 1\n\nresources:\n  gpu: 8\n"
    assert commands_of(task) == "cd a\nbuild \\\n    --x 1"
    assert (flags_of(""), commands_of("type: task")) == ((), "")


def test_a_run_knows_its_configuration(tmp_path):
    (small,) = documents(kept(tmp_path))
    assert (small.runs[0].flags, small.runs[0].hardware) == (("--tp 8",), "H200")
    assert small.configurations[0].document == "small"
