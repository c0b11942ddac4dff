"""Published set-ups as `serving ab --template` prints them: they can be run, say what was mended and what
today's engines have no more, and leave nothing out."""

import re
import subprocess

import pytest

from harness.catalogue import recipes
from harness.serving.published_documents import configurations

NAMES = sorted(configurations())


@pytest.mark.parametrize("name", NAMES)
def test_the_shell_takes_it_and_each_mend_is_told_and_changes_what_it_says(here, name):
    one, done = configurations()[name], here("serving", "ab", "--template", name)
    checked = subprocess.run(["bash", "-n"], input=done.stdout, capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    told = re.sub(r"\n#   +", " ", done.stdout)  # comments are wrapped
    texts = {"docker": one.docker, "task": one.task_file, "client": one.client, **one.manifests}
    texts["server"] = one.serving if one.task_file else one.server
    assert one.mends and not {mend.part for mend in one.mends} - {*texts}
    for part, text in texts.items():
        mended = text
        for mend in (mend for mend in one.mends if mend.part == part):
            assert mend.old and mend.old in text, mend.why
            assert f"\n# {'note' if mend.new is None else 'mended'}: {mend.why}\n" in told
            mended = mended if mend.new is None else mended.replace(mend.old, mend.new)
        assert mended in done.stdout
        assert not [m.why for m in one.mends if m.part == part and m.new is not None and m.old in mended]


def test_what_today_s_engines_have_no_more_is_told_above_it(here):
    lines = here("serving", "ab", "--template", "mi350x-vllm").stdout.splitlines()
    told = lines.index("# no longer: today's engine has no --disable-log-requests; today the default")
    assert told < next(i for i, line in enumerate(lines) if line.strip().startswith("--disable-log-requests"))
    assert "# no longer: today's engine has no VLLM_ROCM_USE_AITER_PAGED_ATTN" in lines
    [environment] = configurations()["mi350x-vllm"].environments.values()
    assert here("serving", "ab", "--template", environment).stdout.splitlines() == lines


def test_the_files_of_a_cluster_are_written_with_its_own_names(here, tmp_path):
    yaml = pytest.importorskip("yaml")
    text = here("serving", "ab", "--template", "moai").stdout
    settings = text.partition("\n# ====")[0]
    parts = [part for part in text.split("\n# ==== ") if part.startswith("manifests")]
    text = "\n".join([settings, *(f"# {part}" for part in parts)])
    text = text.replace('MODEL_DIR="/models/DeepSeek-R1"', 'MODEL_DIR="/data/a b"')
    subprocess.run(["bash", "-e"], input=text, cwd=tmp_path, text=True, check=True)
    written = {path.name: list(yaml.safe_load_all(path.read_text())) for path in tmp_path.iterdir()}
    assert set(written) == set(configurations()["moai"].manifests)
    (values,) = written["inference-service-values.yaml"]
    assert values["extraVolumes"][1]["hostPath"]["path"] == "/data/a b"
    assert (values["prefill"]["replicas"], values["decode"]["replicas"]) == (2, 3)
    common = {one["name"]: one.get("value") for one in values["extraEnvVars"]}
    for role in ("prefill", "decode"):
        own = {one["name"]: one["value"] for one in values[role]["extraEnvVars"]}
        variables = {v.name: v.value for v in recipes.find(f"moai-{role}").variables}
        assert common | own == variables
    assert "--max-num-batched-token 64000 \\\n" in values["prefill"]["args"][0]
    (pod,) = written["benchmarking-client.yaml"]
    assert pod["metadata"]["name"] == pod["spec"]["nodeName"] == "worker-0"
