"""Checkpoints by their files and by what is known of them; resumed runs and replicas by digests."""

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridctl.detect.diagnose.checkpoint_facts import checkpoint_facts
from gridctl.detect.diagnose.checkpoint_files import checkpoint_files
from gridctl.detect.diagnose.replicas import replicas
from gridctl.detect.diagnose.resume import resume
from gridctl.model.diagnosis import Diagnosis, Material

PREVIOUS = ("checkpoint_incomplete", "use_previous_checkpoint")
NONE_LEFT = ("checkpoint_incomplete", "reject_checkpoint")
GATHER = ("checkpoint_not_shared", "gather_shards_before_evacuation")
TRUNCATED = ("checkpoint_truncated", "reject_checkpoint")
TAINTED = ("checkpoint_tainted", "reject_checkpoint")
MIXED = ("checkpoint_inconsistent", "reject_checkpoint")
DIVERGED = ("resume_diverged", "fail_verification")
REPLICAS = ("replica_divergence", "fail_verification")
UNKNOWN = ("missing_data", "fail_verification")
WELL = ("none", "none")


def brief(found: list[Diagnosis]) -> list[tuple[str, str]]:
    assert not any(one.preempt_job for one in found)
    return [(one.kind, one.action) for one in found]


def of(layer: Any, *documents: Any) -> list[Diagnosis]:
    texts = [one if isinstance(one, str) else json.dumps(one) for one in documents]
    return list(layer([Material(f"m{n}", text) for n, text in enumerate(texts)]))


def rows(layer: Any, *records: dict[str, Any]) -> list[Diagnosis]:
    return of(layer, "\n".join(json.dumps(record) for record in records))


Files = dict[str, dict[str, int]]

GOOD = {f"model_{n:02}.safetensors": 4096 for n in range(4)} | {"_SUCCESS": 1}


def with_headings(files: Files) -> str:
    return "".join(
        f"# {folder}\n" + "".join(f"  {size}  {name}\n" for name, size in sizes.items())
        for folder, sizes in files.items()
    )


def ls_recursive(files: Files) -> str:
    text = ".:\ntotal 8\n"
    for folder, sizes in files.items():
        text += f"\n./run/{folder}:\ntotal 99\n"
        text += "".join(f"-rw-r--r-- 1 u g {size} Feb  3 04:05 {name}\n" for name, size in sizes.items())
    return text


def find(files: Files) -> str:
    return "".join(
        f"{s} /ckpt/{folder}/{name}\n" for folder, sizes in files.items() for name, s in sizes.items()
    )


def s3(files: Files) -> str:
    return "".join(
        f"2026-02-03 04:05:06 {s:>10} run/{folder}/{name}\n"
        for folder, sizes in files.items()
        for name, s in sizes.items()
    )


def described(files: Files) -> str:
    return json.dumps({"checkpoints": [{"name": folder, "files": sizes} for folder, sizes in files.items()]})


FORMS = pytest.mark.parametrize("form", [with_headings, ls_recursive, find, s3, described])


@FORMS
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model_02.safetensors": 0}, "zero length model_02.safetensors"),
        ({"model_02.safetensors": 9}, "short model_02.safetensors: 9 of 4096 bytes"),
        ({"_SUCCESS": None}, "no marker"),
        ({"model_02.safetensors": None}, "missing model_02.safetensors"),
        ({"model_03.safetensors": None}, "missing model_03.safetensors"),
        (
            {"model_03.safetensors": None, "model_03.safetensors.tmp": 4096},
            "temporary model_03.safetensors.tmp",
        ),
        ({".tmp_model_04.safetensors": 4096}, "temporary .tmp_model_04.safetensors"),
    ],
)
def test_the_newest_is_rejected_as_a_whole(form: Any, change: dict[str, int | None], why: str) -> None:
    bad = {name: size for name, size in {**GOOD, **change}.items() if size is not None}
    found = of(checkpoint_files, form({"step_900": GOOD, "step_1000": bad}))
    assert brief(found) == [PREVIOUS]
    event = found[0].events[0]
    assert (event["latest_valid"], event["rejected"]) == ("step_900", ["step_1000"])
    assert why in event["why"]


@FORMS
def test_a_complete_newest_one_is_well_whatever_the_older_ones_are(form: Any) -> None:
    assert brief(of(checkpoint_files, form({"iter_0000100": {"a.pt": 0}, "iter_0001000": {"a.pt": 50}}))) == [
        WELL
    ]
    assert brief(of(checkpoint_files, form({"global_step20": GOOD}))) == [WELL]
    assert brief(of(checkpoint_files, form({"checkpoint-9": {"a.pt": 0}, "checkpoint-10": {"a.pt": 0}}))) == [
        NONE_LEFT
    ]


def test_numbers_and_not_the_order_say_which_is_newest() -> None:
    bad = {**GOOD, "model_01.safetensors": 0}
    for files in ({"step_1000": bad, "step_900": GOOD}, {"step_900": GOOD, "step_1000": bad}):
        found = of(checkpoint_files, with_headings(files))
        assert found[0].events[0]["latest_valid"] == "step_900"


def test_shards_that_are_numbered_of_so_many_and_an_index_that_is_missing() -> None:
    files = {f"model-{n:05}-of-00004.safetensors": 10 for n in (1, 2, 4)}
    assert brief(of(checkpoint_files, with_headings({"checkpoint-7": files}))) == [NONE_LEFT]
    distcp = {f"__{n}_0.distcp": 10 for n in range(4)}
    assert brief(of(checkpoint_files, with_headings({"step_7": distcp}))) == [NONE_LEFT]
    assert brief(of(checkpoint_files, with_headings({"step_7": {**distcp, ".metadata": 5}}))) == [WELL]


def test_other_listings_are_no_checkpoints() -> None:
    assert of(checkpoint_files, "# logs\n  12 a.log\n  15 b.log\n") == []
    assert of(checkpoint_files, "  900 nccl_trace_rank_1\n") == []
    assert of(checkpoint_files, "idle gpu-a01\n") == []


def shards(*ranks: int) -> list[str]:
    return [f"__{rank}_0.distcp" for rank in ranks]


@pytest.mark.parametrize(
    "document",
    [
        {
            "hosts": {"n1": [".metadata", *shards(0, 1)], "n2": shards(2, 3)},
            "shared_fs": False,
            "world_size": 4,
        },
        {
            "iteration": 7,
            "nodes": [
                {"host": "n1", "files": [".metadata", *shards(0, 1)]},
                {"host": "n2", "files": shards(2, 3)},
            ],
        },
        {"files_by_host": {"n1": {"files": [".metadata", *shards(0, 1)]}, "n2": {"files": shards(2, 3)}}},
        {"node_files": {"n1": {"metadata": True, "shards": [0, 1]}, "n2": {"shards": [2, 3]}}},
        "n1:/scratch/step_7:\n 9 .metadata\n 9 __0_0.distcp\n 9 __1_0.distcp\n"
        "n2:/scratch/step_7:\n 9 __2_0.distcp\n 9 __3_0.distcp\n",
    ],
)
def test_shards_on_local_disks_are_gathered_first(document: Any) -> None:
    found = of(checkpoint_files, document)
    assert brief(found) == [GATHER]
    assert found[0].events[0]["missing"] == {"n1": 2, "n2": 3}


def test_shards_that_all_see_and_shards_that_nobody_has() -> None:
    every = [".metadata", *shards(0, 1, 2, 3)]
    assert brief(of(checkpoint_files, {"hosts": {"n1": every, "n2": every}})) == [WELL]
    assert brief(of(checkpoint_files, {"hosts": {"n1": every, "n2": shards(2)}, "shared_fs": True})) == [WELL]
    lost = {"hosts": {"n1": [".metadata", *shards(0, 1)], "n2": shards(3)}, "world_size": 4}
    assert brief(of(checkpoint_files, lost)) == [PREVIOUS]
    assert brief(of(checkpoint_files, {"hosts": {"n1": shards(0, 1), "n2": shards(2, 3)}})) == [PREVIOUS]


ZIP = b"PK\x03\x04" + bytes(range(60))
END = b"PK\x05\x06" + bytes(18)


def xxd(data: bytes) -> str:
    return "".join(
        f"{at:08x}: {data[at : at + 16].hex(' ', 2):<40}  "
        f"{''.join(chr(b) if 32 < b < 127 else '.' for b in data[at : at + 16])}\n"
        for at in range(0, len(data), 16)
    )


def hexdump(data: bytes) -> str:
    return "".join(
        f"{at:08x}  {data[at : at + 16].hex(' '):<48}  "
        f"|{''.join(chr(b) if 32 < b < 127 else '.' for b in data[at : at + 16])}|\n"
        for at in range(0, len(data), 16)
    )


def pairs(data: bytes) -> str:
    return "# file begins here\n" + data.hex(" ") + "\n"


@pytest.mark.parametrize("form", [xxd, hexdump, pairs, lambda data: data.hex(" ").upper().replace(" ", ", ")])
def test_a_zip_without_its_end_was_cut_off(form: Any) -> None:
    data = ZIP[:30] if form is not xxd and form is not hexdump else ZIP
    assert brief(of(checkpoint_facts, form(data))) == [TRUNCATED]
    if form is not pairs:
        assert brief(of(checkpoint_facts, form(ZIP[:8] + END[:22]))) == [WELL]


def test_other_files_by_their_bytes() -> None:
    assert brief(of(checkpoint_facts, pairs(bytes(32)))) == [TRUNCATED]
    assert brief(of(checkpoint_facts, pairs(struct.pack("<Q", 9000) + b'{"a":'))) == [TRUNCATED]
    assert of(checkpoint_facts, pairs(struct.pack("<Q", 4) + b'{"a"')) == []
    assert of(checkpoint_facts, "dead beef cafe\n") == []
    assert of(checkpoint_facts, "cafe and more words\n") == []


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
        "[rank3]: EOFError: Ran out of input",
        "RuntimeError: unexpected EOF, expected 4 more bytes. The file might be corrupted.",
        "_pickle.UnpicklingError: pickle data was truncated",
        "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
    ],
)
def test_what_readers_print_of_a_cut_file(line: str) -> None:
    assert brief(of(checkpoint_facts, f"Traceback (most recent call last):\n{line}\n")) == [TRUNCATED]
    assert of(checkpoint_facts, f"the user's text says {line}\n") == []


def test_the_ends_of_a_file() -> None:
    head = {"file": "a.pt", "head_hex": "50 4b 03 04 14 00"}
    assert brief(of(checkpoint_facts, {**head, "tail_hex": "00 00 00 00"})) == [TRUNCATED]
    assert of(checkpoint_facts, {**head, "tail_hex": "50 4b 05 06 00 00"}) == []
    assert of(checkpoint_facts, head) == []


def test_sizes_against_what_was_expected() -> None:
    assert brief(of(checkpoint_facts, {"file": "a.pt", "size": 5, "expected_size": 9})) == [TRUNCATED]
    assert of(checkpoint_facts, {"file": "a.pt", "size": 9, "expected_size": 9}) == []


@pytest.mark.parametrize(
    "document",
    [
        {"tensors": {"w": {"abs_mean": 2e-41, "nan": 0}}},
        {"tensors": {"w": {"abs_mean": 0.02, "nan": 3}}},
        {"tensors": [{"name": "w", "rms": 0.02, "inf_count": 1}]},
        {"tensor": "w", "norm": "NaN", "nan": 0},
        {"params": {"w": {"norm": 0.0}}, "previous_norm": {"w": 3.5}},
        {"params": {"w": {"norm": 9e6, "previous": 3.5}}},
        {"stats": {"w": {"std": 0.01, "has_nan": True}}},
    ],
)
def test_weights_that_load_and_are_useless(document: Any) -> None:
    found = of(checkpoint_facts, document)
    assert brief(found) == [TAINTED]
    assert found[0].events == [{"tensor": "w"}]


def test_small_weights_and_unknown_ones_are_no_damage() -> None:
    for values in ({"abs_mean": 1e-6, "nan": 0}, {"abs_mean": 0.0, "nan": 0}, {"norm": 3.0, "previous": 3.1}):
        assert brief(of(checkpoint_facts, {"tensors": {"w": values}})) == [WELL]
    assert of(checkpoint_facts, {"tensors": {"w": {"shape": [3], "abs_mean": None, "nan": None}}}) == []


def test_parts_of_one_step() -> None:
    assert brief(of(checkpoint_facts, {"requested_step": 5, "metadata_step": 9, "payload_step": 5})) == [
        MIXED
    ]
    assert brief(of(checkpoint_facts, {"model": {"iteration": 5}, "optimizer": {"iteration": 6}})) == [MIXED]
    assert brief(of(checkpoint_facts, {"requestedStep": 5, "loaded_step": 9})) == [MIXED]
    assert brief(
        of(checkpoint_facts, {"requested_step": 5, "tracker_latest": 9, "metadata_step": 5, "model_step": 5})
    ) == [WELL]
    assert brief(of(checkpoint_facts, {"metadata_from": "/c/step_9", "payload_from": "/c/step_5"})) == [MIXED]
    assert of(checkpoint_facts, {"step": 5, "loss": 2}) == []


def test_checkpoints_after_the_first_suspect_step_are_not_used() -> None:
    document = {"first_suspect_step": 450, "checkpoints": [300, 400, 500]}
    found = of(checkpoint_facts, document)
    assert brief(found) == [("checkpoint_tainted", "use_previous_checkpoint")]
    assert found[0].events[0] == {"tainted": [500], "latest_valid": 400}
    assert brief(of(checkpoint_facts, {**document, "first_suspect_step": 200})) == [TAINTED]
    assert of(checkpoint_facts, {**document, "first_suspect_step": 900}) == []


@pytest.mark.parametrize(
    ("records", "suspect", "ranks"),
    [
        (
            [{"rank": n, "rng_digest_saved": f"a{n}", "rng_digest_loaded": "a0"} for n in range(8)],
            "rng_state",
            7,
        ),
        (
            [{"rank": n, "rng": {"digest": {"before": n, "after": n + (n == 5)}}} for n in range(8)],
            "rng_state",
            1,
        ),
        ([{"global_rank": 3, "expected_optim_sha": "aa", "actual_optim_sha": "bb"}], "optimizer", 1),
        ([{"rank": 0, "samplerOffsetSaved": 512, "samplerOffsetRestored": 513}], "data_position", 1),
        (
            [
                {"rank": 0, "phase": "saved", "rng_digest": "1"},
                {"rank": 0, "phase": "loaded", "rng_digest": "2"},
            ],
            "rng_state",
            1,
        ),
        (
            [{"tokenizer_hash": {"source": "aa", "target": "bb"}, "env": {"PYTHONHASHSEED": None}}],
            "environment",
            1,
        ),
        ([{"env": {"saved": {"PYTHONHASHSEED": "0"}, "resumed": {"PYTHONHASHSEED": "1"}}}], "environment", 1),
        ([{"rng": {"saved": {"0": "a", "1": "b"}, "loaded": {"0": "a", "1": "a"}}}], "rng_state", 1),
        ([{"rng_digest": {"saved": ["a", "b", "c"], "loaded": ["a", "a", "a"]}}], "rng_state", 2),
        ([{"exp_avg": {"saved": 0.31, "loaded": 0.0}}], "optimizer", 1),
    ],
)
def test_what_was_loaded_is_compared_with_what_was_saved(records: Any, suspect: str, ranks: int) -> None:
    found = rows(resume, *records)
    assert brief(found) == [DIVERGED]
    assert (found[0].events[0]["suspect"], found[0].events[0]["ranks_bad"]) == ([suspect], ranks)


def test_equal_sides_are_well_and_a_missing_side_is_not_equal() -> None:
    same = [{"rank": n, "rng_digest_saved": f"0xA{n}", "rng_digest_loaded": f"a{n}"} for n in range(4)]
    assert brief(rows(resume, *same)) == [WELL]
    assert brief(rows(resume, *same, {"rank": 4, "rng_digest_saved": "a", "rng_digest_loaded": None})) == [
        UNKNOWN
    ]
    assert brief(rows(resume, *same, {"rank": 4, "rng_digest_saved": "a"})) == [UNKNOWN]
    measured = {
        "load_time_s": {"before": 3, "after": 9},
        "env": {"saved": {"HOSTNAME": "a"}, "resumed": {"HOSTNAME": "b"}},
    }
    assert rows(resume, measured, {"checkpoint_sha": "x"}, {"source": "a"}) == []


def test_the_loss_around_a_resume_and_at_the_same_step() -> None:
    assert brief(rows(resume, {"loss": {"before": 2.3, "after": 8.1}})) == [DIVERGED]
    assert rows(resume, {"loss": {"before": 2.31, "after": 2.36}}) == []
    curve = [{"step": n, "loss_reference": 2.0, "loss_resumed": 2.0 + 0.01 * (n > 3)} for n in range(6)]
    found = rows(resume, *curve)
    assert brief(found) == [DIVERGED]
    assert "loss at step 4: 2 and 2.01, after 4 equal values" in found[0].why.evidence
    assert brief(rows(resume, *curve[:4])) == [WELL]
    apart = [
        {"run": run, "step": n, "loss": 2.0 + (run == "resumed" and n > 1)}
        for run in ("original", "resumed")
        for n in range(4)
    ]
    assert brief(rows(resume, *apart)) == [DIVERGED]


def digests(*values: Any, key: str = "param_digest", rank: str = "dp_rank", **more: Any) -> list[Diagnosis]:
    return rows(replicas, *({"step": 7, rank: n, key: value, **more} for n, value in enumerate(values)))


def test_the_replica_that_is_other_than_most() -> None:
    found = digests("aa", "aa", "bb", "aa")
    assert brief(found) == [REPLICAS]
    assert found[0].events == [{"minority_ranks": [2], "suspect": "param_sync"}]
    assert brief(digests("aa", "bb", key="weightsHash", rank="rank")) == [REPLICAS]
    assert digests("aa", "bb")[0].events[0]["minority_ranks"] == []
    assert brief(digests("aa", "AA", "aa")) == [WELL]


def test_replicas_in_maps_and_lists_and_under_plain_names() -> None:
    for document in (
        {"step": 3, "param_digest": {"0": "a", "1": "a", "2": "b"}},
        {"step": 3, "param_sha": ["a", "a", "b"]},
        {"digest": {"rank0": "a", "rank1": "a", "rank2": "b"}},
        {"checksums": {"model": {"dp0": {"sha": "a"}}}, "hash": ["a", "a", "b"]},
    ):
        found = of(replicas, document)
        assert brief(found) == [REPLICAS]
        assert found[0].events[0]["minority_ranks"] == [2]
    assert brief(of(replicas, {"digest": {"rank0": "a", "rank1": "b"}})) == [
        ("missing_data", "manual_review")
    ]


def test_shards_other_steps_and_random_states_are_not_compared() -> None:
    assert brief(digests("a", "b", "c", rank="rank")) == [("missing_data", "manual_review")]
    assert digests("a", "b", "a", key="rng_digest") == []
    other = [{"step": n, "rank": n, "param_digest": f"{n}"} for n in range(4)]
    assert rows(replicas, *other) == []
    places = [
        {"step": 1, "dp_rank": d, "tp_rank": t, "param_digest": f"{t}"} for d in range(3) for t in range(2)
    ]
    assert brief(rows(replicas, *places)) == [WELL]
    assert digests(None, "a") == []


KEYS = st.sampled_from(
    "rank dp_rank step rng_digest_saved rng_digest_loaded env PYTHONHASHSEED loss before after "
    "param_digest files name "
    "hosts world_size tensors abs_mean nan metadata_step payload_step requested_step checkpoints "
    "size expected_size "
    "first_suspect_step shared_fs phase".split()
)
WORDS = st.sampled_from(["a.pt", ".metadata", "__1_0.distcp", "step_5", "saved", "1e999", "model-1-of-3.bin"])
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6), WORDS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(KEYS, WORDS), inner, max_size=5)
    ),
    max_leaves=12,
)


@given(st.lists(st.dictionaries(KEYS, JSON, max_size=6), max_size=6))
def test_no_json_makes_these_layers_raise(records: list[dict[str, Any]]) -> None:
    for text in ("\n".join(json.dumps(record) for record in records), json.dumps(records, indent=1)):
        for layer in (checkpoint_files, checkpoint_facts, resume, replicas):
            of(layer, text)


PIECES = st.sampled_from(
    ["50 4b 03 04", "00000000: ", " 12 ", "a.pt\n", "# step_3\n", "h:/x/step_4:\n", "\n", "zip", "0" * 40]
)


@given(
    st.lists(st.one_of(PIECES, st.text(max_size=12), st.binary(max_size=9).map(bytes.hex)), max_size=40).map(
        "".join
    )
)
def test_no_text_makes_these_layers_raise(text: str) -> None:
    for layer in (checkpoint_files, checkpoint_facts, resume, replicas):
        of(layer, text)
