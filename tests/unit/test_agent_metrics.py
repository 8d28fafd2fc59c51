"""The page of metrics: names, units, both formats, which one is asked for, and labels that others chose."""

import math
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridagent.telemetry import metric_names
from gridagent.telemetry.metrics import LABEL_CHARS_MAX, SAMPLES_MAX, Samples, render, wants_openmetrics
from gridagent.wire import NodeStatus, RankStatus

STATUS = NodeStatus(node="n1", url="", serial="", boot_id="b", version="v", now_unix_s=0.0, stream_seq=3)
ABOUT = {"pci": "0000:1a:00.0", "uuid": "GPU-1", "serial": "77", "model": "H200"}
SERIES = re.compile(
    r'[a-zA-Z_:][a-zA-Z0-9_:]*(\{([a-zA-Z_]\w*="([^"\\\n]|\\["\\n])*",?)+\})? (-?[0-9.e+-]+|NaN|[+-]Inf)'
)


def page(samples: Samples, *, openmetrics: bool = False) -> str:
    return render(STATUS, samples, openmetrics=openmetrics)


def sampled(device: str = "gpu:0", **values: object) -> Samples:
    samples = Samples()
    samples.take({"device": device, **ABOUT, "v": values})
    return samples


def test_ranks_of_hostile_names_and_without_a_finite_loss() -> None:
    rank = RankStatus(
        job='j"\\\n', rank=0, world_size=1, session="s", pid=1, epoch=0, step=9, connected=True, loss=math.inf
    )
    lost = msgspec.structs.replace(rank, connected=False, step=3)
    text = render(msgspec.structs.replace(STATUS, ranks=[rank, lost]), Samples(), openmetrics=False)
    assert text.count("gridagent_rank_step{") == 1
    assert 'gridagent_rank_loss{job="j\\"\\\\\\n",rank="0"} +Inf\n' in text
    assert 'gridagent_rank_step{job="j\\"\\\\\\n",rank="0"} 9.0\n' in text


def test_values_are_in_base_units_and_unknown_ones_are_not_there() -> None:
    samples = sampled(temp_c=60, util_pct=97, mem_used_mib=2, sm_clock_mhz=1980, power_w=None)
    samples.take({"device": "nic:mlx5_0/1", "v": {"rate_gbps": 400, "rx_bytes_total": 7}})
    samples.take({"device": 7, "v": {}})
    samples.take({"v": "x"})
    lines = page(samples).splitlines()
    assert 'gridagent_gpu_temp_celsius{device="gpu:0"} 60.0' in lines
    assert 'gridagent_gpu_util_ratio{device="gpu:0"} 0.97' in lines
    assert 'gridagent_gpu_mem_used_bytes{device="gpu:0"} 2097152.0' in lines
    assert 'gridagent_gpu_sm_clock_hertz{device="gpu:0"} 1980000000.0' in lines
    assert 'gridagent_nic_rate_bytes_per_second{device="nic:mlx5_0/1"} 50000000000.0' in lines
    assert 'gridagent_nic_rx_bytes_total{device="nic:mlx5_0/1"} 7.0' in lines
    assert "power" not in page(samples)


def test_a_null_takes_the_value_away_and_the_gpu_stays_known() -> None:
    samples = sampled(temp_c=60, lost=0)
    samples.take({"device": "gpu:0", "v": {"temp_c": None, "lost": 1}})
    text = page(samples)
    assert "temp" not in text
    assert 'gridagent_gpu_lost{device="gpu:0"} 1.0\n' in text
    assert (
        'gridagent_gpu_info{device="gpu:0",pci="0000:1a:00.0",uuid="GPU-1",serial="77",model="H200"} 1.0'
        in text
    )


def test_dcgm_names_with_the_labels_and_units_of_its_exporter() -> None:
    samples = sampled(temp_c=60, util_pct=97, mem_used_mib=2, pcie_replay_total=4)
    labels = (
        '{gpu="0",UUID="GPU-1",pci_bus_id="00000000:1A:00.0",device="nvidia0",modelName="H200",Hostname="n1"}'
    )
    plain, openmetrics = page(samples), page(samples, openmetrics=True)
    for text in (plain, openmetrics):
        assert f"DCGM_FI_DEV_GPU_TEMP{labels} 60.0\n" in text
        assert f"DCGM_FI_DEV_GPU_UTIL{labels} 97.0\n" in text
        assert f"DCGM_FI_DEV_FB_USED{labels} 2.0\n" in text
        assert f"DCGM_FI_DEV_PCIE_REPLAY_COUNTER{labels} 4.0\n" in text
    assert "# TYPE DCGM_FI_DEV_PCIE_REPLAY_COUNTER untyped\n" in plain
    assert "# TYPE DCGM_FI_DEV_PCIE_REPLAY_COUNTER unknown\n" in openmetrics


def test_labels_are_the_same_before_a_gpu_has_said_who_it_is() -> None:
    samples = Samples()
    samples.take({"device": "gpu:10", "v": {"temp_c": 1}})
    samples.take({"device": "gpu:9", "v": {"temp_c": 2}})
    empty = 'UUID="",pci_bus_id="",device="nvidia9",modelName="",Hostname="n1"'
    text = page(samples)
    assert f'DCGM_FI_DEV_GPU_TEMP{{gpu="9",{empty}}} 2.0' in text
    assert text.index('celsius{device="gpu:9"}') < text.index('celsius{device="gpu:10"}')


def test_help_type_and_unit() -> None:
    samples = sampled(ecc_sbe_total=2, temp_c=60)
    plain, openmetrics = page(samples), page(samples, openmetrics=True)
    assert "# TYPE gridagent_gpu_ecc_sbe_total counter\ngridagent_gpu_ecc_sbe_total{" in plain
    assert "# TYPE gridagent_gpu_ecc_sbe counter\ngridagent_gpu_ecc_sbe_total{" in openmetrics
    assert (
        "# TYPE gridagent_gpu_temp_celsius gauge\n# UNIT gridagent_gpu_temp_celsius celsius\n" in openmetrics
    )
    assert "# HELP gridagent_gpu_temp_celsius Temperature.\n" in plain
    assert "UNIT" not in plain
    assert openmetrics.endswith("\n# EOF\n")
    assert "EOF" not in plain


def test_no_sample_takes_the_name_of_another_family() -> None:
    samples = sampled("rank:0", step=1, step_total=2)
    samples.take({"device": "gpu:0", "v": {"x": 1, "x_total": 2, "info": 3}})
    status = msgspec.structs.replace(
        STATUS,
        ranks=[
            RankStatus(job="j", rank=0, world_size=1, session="s", pid=1, epoch=0, step=9, connected=True)
        ],
    )
    text = render(status, samples, openmetrics=True)
    titles = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(titles) == len(set(titles))
    assert 'gridagent_rank_step{job="j",rank="0"} 9.0' in text
    assert 'gridagent_rank_step{device="rank:0"}' not in text


def test_more_values_than_a_node_has_are_not_kept() -> None:
    samples = Samples()
    for device in range(SAMPLES_MAX + 10):
        samples.take({"device": f"disk:{device}", "v": {"free_mib": 1}})
    assert page(samples).count("gridagent_disk_free_bytes{") == SAMPLES_MAX
    samples.take({"device": "disk:0", "v": {"free_mib": None}})
    samples.take({"device": "disk:new", "v": {"free_mib": 1}})
    assert 'device="disk:new"' in page(samples)


def test_long_labels_and_numbers_that_are_none() -> None:
    samples = sampled("disk:/" + "x" * 1000, free_mib=1, total_mib=10**400, inodes_free=math.nan)
    samples.take({"device": "disk:/\udcff", "v": {"free_mib": 1}})
    text = page(samples)
    text.encode()
    assert "x" * (LABEL_CHARS_MAX + 1) not in text
    assert "total" not in text.replace("_total", "")
    assert 'device="disk:/?"' in text


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", True),
        ("application/openmetrics-text;version=0.0.1", False),
        ("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2,*/*;q=0.1", True),
        ("application/openmetrics-text;q=0.2, text/plain;q=0.5", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=nan", False),
        ("Application/OpenMetrics-Text", True),
        (';;==,,q="\x00', False),
    ],
)
def test_which_format_is_asked_for(accept: str, openmetrics: bool) -> None:
    assert wants_openmetrics(accept) is openmetrics


def test_every_metric_that_sources_are_documented_to_have_is_explained() -> None:
    generic = metric_names.neutral("gpu", "no_such_metric").text
    assert not [name for name in metric_names.DCGM if metric_names.neutral("gpu", name).text == generic]


@given(
    device=st.text(max_size=20) | st.from_regex(r"(gpu|nic|disk):[^\n]{0,8}", fullmatch=True),
    about=st.text(max_size=300),
    values=st.dictionaries(
        st.text(max_size=12) | st.sampled_from(["temp_c", "x_total", "x", "s", "_total", "info", "a__b"]),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
        max_size=6,
    ),
    openmetrics=st.booleans(),
)
def test_every_line_is_a_comment_or_a_series(
    device: str, about: str, values: dict[str, object], openmetrics: bool
) -> None:
    samples = Samples()
    samples.take({"device": device, "uuid": about, "v": values})
    samples.take({"device": "gpu:0", "model": about, "v": {"temp_c": 1}})
    lines = page(samples, openmetrics=openmetrics).split("\n")
    assert lines.pop() == ""
    if openmetrics:
        assert lines.pop() == "# EOF"
    names = []
    for line in lines:
        if line.startswith("# TYPE "):
            names.append(line.split(" ")[2])
        elif not line.startswith(("# HELP ", "# UNIT ")):
            assert SERIES.fullmatch(line), line
    assert len(names) == len(set(names))
