"""The published documents as data: what stands alone in them, and files that do not hold."""

import hashlib
import json

import check_documents
import pytest

from harness.catalogue import recipes
from harness.errors import UsageError
from harness.serving.published.documents import commands_of, configurations, documents, flags_of

DOCUMENTS = {one.id: one for one in documents()}
RUNS = {run.id: run for one in DOCUMENTS.values() for run in one.runs}


def test_a_run_has_what_its_configuration_says():
    run = RUNS["moai-512-512-sharegpt"]
    assert (run.gpus, run.nodes, run.image.rpartition(":")[2]) == (40, 5, "vllm_251212")
    assert (run.parallelism.prefill_gpus, run.parallelism.decode_gpus) == (16, 24)
    assert "--quantization ds_fp8_per_token" in run.flags
    assert "prefill: --max-num-batched-token 64000" in run.flags
    moai = configurations()["moai"]
    for name, role in moai.roles.items():
        assert moai.environment | role.environment == recipes.find(f"moai-{name}").environment
    assert RUNS["mi350x-vllm-c1"].environment == recipes.find("mi350x-vllm").environment


SMALL = {
    "id": "small",
    "title": "A small one",
    "publisher": "nobody",
    "sha256": hashlib.sha256(b"a text").hexdigest(),
    "configurations": [
        {"name": "c", "hardware": "H200", "engine": "vllm", "server": ["vllm serve m \\", "  --tp 8 &"]}
    ],
    "runs": [{"id": "r", "client": "document.table", "source": "Table 1", "configuration": "c"}],
    "claims": [{"id": "k", "quote": "9 tok/s", "where": "head", "kind": "claim", "refers_to": ["r"]}],
}


def kept(folder, **changes):
    (folder / "small.json").write_text(json.dumps(SMALL | changes))
    return folder


RUN, CONFIGURATION, CLAIM = (SMALL[part][0] for part in ("runs", "configurations", "claims"))


@pytest.mark.parametrize(("changes", "told"), [
    ({"title": 5}, "title"),
    ({"sha256": None}, "sha256"),
    ({"surplus": 1}, "surplus"),
    ({"runs": [RUN | {"configuration": "none"}]}, "none"),
    ({"runs": ["r"]}, "small.json"),
    ({"configurations": [{"name": "c"}]}, "hardware"),
    ({"configurations": [CONFIGURATION | {"environments": {"": "nothing"}}]}, "nothing"),
    ({"claims": [CLAIM | {"refers_to": ["q"]}]}, "'q'"),
    ({"claims": [CLAIM | {"configuration": "d"}]}, "'d'"),
    ({"claims": [CLAIM, CLAIM]}, "'k' stands twice"),
])  # fmt: skip
def test_a_broken_document_ends_with_one_line(tmp_path, changes, told):
    with pytest.raises(UsageError) as error:
        documents(kept(tmp_path, **changes))
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_json_and_a_folder_with_none(tmp_path):
    with pytest.raises(UsageError, match="no published document"):
        documents(tmp_path)
    for text, told in (("{", r"cannot read .*a\.json"), ("[]", "an object is wanted")):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(UsageError, match=told):
            documents(tmp_path)


def test_flags_are_those_of_the_last_command_and_a_tasks_commands_join_what_yaml_folds():
    text = "pip install x --pre\nserve m --a -1 more --c '{\"d\": 1}' \\\n  --b & # --e"
    assert flags_of(text) == ("--a -1", '--c {"d": 1}', "--b")
    task = "type: task\ncommands:\n  - cd a\n  - build \n        --x 1\n\nresources:\n  gpu: 8\n"
    assert commands_of(task) == "cd a\nbuild \\\n    --x 1"
    assert (flags_of(""), commands_of("type: task")) == ((), "")


def test_the_check_against_texts_finds_what_is_not_there(tmp_path):
    (small,) = documents(kept(tmp_path, runs=[SMALL["runs"][0] | {"totals": {"output_tokens": 4096}}]))
    assert (small.runs[0].flags, small.runs[0].hardware) == (("--tp 8",), "H200")
    assert small.configurations[0].document == "small"
    held = "vllm serve m \\\n  --tp 8 &\nit has\n9 tok/s with 4,096 tokens"
    assert list(check_documents.wrong(small, held)) == []
    for old, new, told in (
        ("9 tok", "8 tok", "k: no such sentence: 9 tok/s"),
        ("tp 8", "tp 4", "c: no such line: --tp 8 &"),
        ("4,096", "4,095", "r: no such number: 4096"),
    ):
        assert list(check_documents.wrong(small, held.replace(old, new))) == [told]
