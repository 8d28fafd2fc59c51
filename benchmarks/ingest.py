"""How fast one core takes in what a fleet tells, and how much memory that needs. Prints, asserts nothing.

usage: python benchmarks/ingest.py [NODES] [SECONDS]

Every node sends what an agent sends, as the lines of its stream: 8 GPUs each second (every tenth time with
the counters that firmware keeps), a beat each second, main memory each 5 s; and each 10 s 8 ports, a step of
8 ranks and a probe of another node. Temperatures, powers, clocks and loads change with every sample; one GPU
in a thousand is throttled now and then, one in ten thousand has a corrected error a second, and now and then
a node loses a GPU. Making the lines is not counted. Time is CPU time: what else runs here matters less.
"""

import random
import resource
import sys
import time
from collections.abc import Iterator

from gridctl.detect.ingest import Ingest
from gridctl.detect.policy import builtin
from gridctl.detect.watch import Watch
from gridctl.model.findings import Decision, Finding, WatchedNode

GPUS = 8
START_UNIX_S = 1_790_000_000.0
#: Not measured: after every device has told of each of its metrics twice, what is known of it is complete.
WARM_UP_S = 22
FAST = (
    '"temp_c":{temp},"temp_margin_c":{margin},"mem_temp_c":{temp},"power_w":{power},"power_limit_w":700.0,'
    '"sm_clock_mhz":{clock},"mem_clock_mhz":2619,"throttle":{throttle},"util_pct":{load},"mem_used_mib":{mem},'
    '"mem_total_mib":81559.0,"ecc_sbe_total":{sbe},"ecc_dbe_total":0,"ecc_sram_ue_total":0,"ecc_sram_threshold":0,'
    '"pcie_replay_total":7,"pcie_gen":5,"pcie_gen_max":5,"pcie_width":16,"pcie_width_max":16,"recovery_action":0,'
    '"processes":1,"mig_mode":0,"mig_mode_pending":0'
)
SLOW = (
    ',"remap_corr_total":0,"remap_uncorr_total":0,"remap_pending":0,"remap_failed":0,"retired_pages":null,'
    '"nvlink_down":0,"nvlink_crc_total":{crc},"nvlink_replay_total":2,"nvlink_recovery_total":0'
)
PORT = (
    '"state":1,"rate_gbps":400.0,"link_downed_total":0,"link_error_recovery_total":0,"symbol_err_total":{crc},'
    '"rcv_err_total":0,"xmit_discards_total":4,"xmit_wait_total":{many},"local_integrity_total":0,'
    '"rx_bytes_total":{many},"tx_bytes_total":{many},"ecn_marked_total":{some},"cnp_total":{some},'
    '"out_of_sequence_total":3,"packet_seq_err_total":0,"local_ack_timeout_total":0'
)
#: Of the metrics above, those of main memory too.
SERIES_PER_NODE = GPUS * (FAST.count('":') + SLOW.count('":') + PORT.count('":')) + 2


class Node:
    """What one agent writes."""

    def __init__(self, number: int, nodes: int) -> None:
        self.name = f"r{number // 8:04d}-n{number % 8}"
        self.neighbour = f"r{number // 8:04d}-n{(number + 1) % 8 if number // 8 < nodes // 8 else 0}"
        self.number, self.seq, self.errors = number, 0, [0] * GPUS
        self.boot = f"{number:08x}-8a1b-4c6e-9d2f-0123456789ab"

    def lines(self, second: int, chance: random.Random) -> bytes:
        made = [("beat", f'"boot":"{self.boot}","seq":{second + 1}')]
        for gpu in range(GPUS):
            made.append(("sample", self._gpu(gpu, second, chance)))
        if (second + self.number) % 5 == 0:
            free = 1_500_000 + chance.randrange(100_000) / 8
            made.append(("sample", f'"device":"node","v":{{"load1":{gpu},"mem_avail_mib":{free}}}'))
        if (second + self.number) % 10 == 0:
            made += [("sample", self._port(port, second, chance)) for port in range(8)]
            made += [("progress", self._step(rank, second, chance)) for rank in range(8)]
            made.append(("probe", f'"target":"{self.neighbour}","rtt_us":{chance.randrange(90, 200) / 10}'))
        if second > WARM_UP_S and second % 7 == 0 and self.number == second * 37:
            line = "NVRM: Xid (PCI:0000:1b:00): 79, pid=3, name=a, GPU has fallen off the bus."
            made.append(("log", f'"source":"kmsg","line":"{line}"'))
        return b"".join(self._line(kind, body, second) for kind, body in made)

    def _line(self, kind: str, body: str, second: int) -> bytes:
        self.seq += 1
        t_unix_s = START_UNIX_S + second + self.number / 20_000
        return (
            f'{{"seq":{self.seq},"boot":"{self.boot}","t_unix_s":{t_unix_s},"node":"{self.name}",'
            f'"kind":"{kind}","v":{{{body}}}}}\n'
        ).encode()

    def _gpu(self, gpu: int, second: int, chance: random.Random) -> str:
        index = self.number * GPUS + gpu
        self.errors[gpu] += index % 10_000 == 1
        values = (FAST + SLOW if (second + self.number) % 10 == 0 else FAST).format(
            temp=60 + chance.randrange(20),
            margin=20 - chance.randrange(20),
            power=round(600 + chance.random() * 100, 3),
            clock=1830 + 15 * chance.randrange(10),
            throttle=0x40 if index % 1000 == 7 and chance.random() < 0.3 else 4 * chance.randrange(2),
            load=95 + chance.randrange(6),
            mem=75_000.25 + chance.randrange(100),
            sbe=self.errors[gpu],
            crc=chance.randrange(9),
        )
        about = f'"device":"gpu:{gpu}","pci":"0000:{0x1B + gpu:02x}:00.0"'
        return f'{about},"uuid":"GPU-{index:08x}-0d3c-4f1e-8c2a-5b7d9e1f3a6c","v":{{{values}}}'

    def _port(self, port: int, second: int, chance: random.Random) -> str:
        some, many = second * 9 + chance.randrange(9), second * 10**12 + chance.randrange(10**9)
        values = PORT.format(crc=chance.randrange(9), some=some, many=many)
        return f'"device":"nic:mlx5_{port}/1","v":{{{values}}}'

    def _step(self, rank: int, second: int, chance: random.Random) -> str:
        loss, rank = 2.3 + chance.random() / 10, self.number % 64 * 8 + rank
        return (
            f'"job":"job-{self.number // 64}","rank":{rank},"epoch":0,"step":{second // 10},'
            f'"loss":{loss},"step_s":{10 + chance.random() / 9},"grad_norm":0.6'
        )


def seconds(fleet: list[Node], count: int) -> Iterator[list[tuple[str, bytes]]]:
    chance = random.Random(7)
    for second in range(count):
        yield [(node.name, node.lines(second, chance)) for node in fleet]


def rss_mib() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() / 2**20


def main() -> None:
    nodes = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    length_s = int(sys.argv[2]) if len(sys.argv) > 2 else 30
    fleet = [Node(number, nodes) for number in range(nodes)]
    before_mib = rss_mib()
    facts = [
        WatchedNode(
            name=n.name, rack=n.name[:5], nvlink_domain=n.name[:5], cooling_zone=n.name[:4], gpus=GPUS
        )
        for n in fleet
    ]
    policy = builtin()
    watch = Watch(policy, facts, {node.name: {f"job-{node.number // 64}"} for node in fleet})
    ingest = Ingest(policy, watch)
    cpu_s, lines, told, worst_s, size = 0.0, 0, [], 0.0, 0
    for second, chunks in enumerate(seconds(fleet, WARM_UP_S + length_s)):
        now_unix_s = START_UNIX_S + second + 0.5
        start_s = time.process_time()
        for name, chunk in chunks:
            told += ingest.feed(name, chunk, now_unix_s)
        told += watch.tick(now_unix_s)
        took_s = time.process_time() - start_s
        if second >= WARM_UP_S:
            cpu_s, worst_s = cpu_s + took_s, max(worst_s, took_s)
            lines += sum(chunk.count(b"\n") for _, chunk in chunks)
            size += sum(len(chunk) for _, chunk in chunks)
        else:
            print(f"second {second + 1} of the warm-up: {took_s:.2f} s", file=sys.stderr)
        del chunks
    used_mib = rss_mib() - before_mib
    found = sum(isinstance(out, Finding) for out in told)
    decided = sum(isinstance(out, Decision) for out in told)
    per_s = f"{lines / length_s:.0f} lines ({size / length_s / 1e6:.1f} MB)"
    print(f"{nodes} nodes of {GPUS} GPUs, {per_s} a second")
    print(
        f"{length_s / cpu_s:.2f} times real time on one core, {cpu_s / lines * 1e6:.2f} us a line; ", end=""
    )
    print(f"the slowest second took {worst_s:.2f} s")
    print(
        f"{rss_mib():.0f} MiB resident with the lines of one second, {used_mib:.0f} MiB more than before: ",
        end="",
    )
    series, lines_bytes = nodes * SERIES_PER_NODE, size / length_s
    print(f"{used_mib * 2**20 / series:.0f} bytes for each of {series} series, ", end="")
    print(f"{(used_mib * 2**20 - lines_bytes) / series:.0f} without those lines")
    print(f"{found} findings, {decided} decisions, {ingest.unreadable} lines unreadable")


if __name__ == "__main__":
    main()
