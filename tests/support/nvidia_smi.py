"""A program named ``nvidia-smi`` that behaves as those of drivers of different ages, and of machines in trouble."""

import json
import sys
from pathlib import Path

FIELDS = {
    "index", "uuid", "gpu_uuid", "name", "gpu_name", "memory.total", "driver_version", "utilization.gpu",
    "memory.used", "power.draw", "clocks.sm", "clocks.current.sm", "clocks.mem", "clocks.current.memory",
    "temperature.gpu",
}  # fmt: skip
OLD = FIELDS | {"clocks_throttle_reasons.active"}
"""The fields of a driver before 535."""
NEW = OLD | {"clocks_event_reasons.active"}
"""The fields of a current driver, which knows both names."""

PROGRAM = r"""#!{python} -SE
import json, pathlib, sys
here = pathlib.Path(__file__).parent
with open(here / "asked", "a") as asked:
    asked.write(" ".join(sys.argv[1:]) + "\n")
told = json.loads((here / "behaviour.json").read_text())
options = dict(word.partition("=")[::2] for word in sys.argv[1:] if word.startswith("--"))
words = sys.argv[1:]
chosen = words[words.index("-i") + 1].split(",") if "-i" in words else None

def end(code):
    sys.stdout.flush()
    sys.exit(code)

if told.get("fails"):
    print(told["fails"])
    end(9)
if "--query-compute-apps" in options:
    print(*told.get("apps", []), sep="\n")
    end(0)
fields = options["--query-gpu"].split(",")
for field in fields:
    if field not in told["fields"]:
        print(f'Field "{field}" is not a valid field to query.\n')
        end(2)

def rows():
    told = json.loads((here / "behaviour.json").read_text())
    for device in told["devices"]:
        values = told["values"] | device
        if chosen is None or values["uuid"] in chosen or values["index"] in chosen:
            names = {"gpu_uuid": "uuid", "gpu_name": "name", "clocks.current.sm": "clocks.sm",
                     "clocks.current.memory": "clocks.mem",
                     "clocks_event_reasons.active": "clocks_throttle_reasons.active"}
            yield ", ".join(values[names.get(field, field)] for field in fields)

for line in (*rows(), *told.get("noise", [])):
    print(line)
print(told.get("stderr", ""), file=sys.stderr)
end(told.get("code", 0))
"""

VALUES = {
    "name": "NVIDIA H200",
    "memory.total": "143771",
    "driver_version": "570.1",
    "utilization.gpu": "37",
    "memory.used": "512",
    "power.draw": "700.25",
    "clocks.sm": "1980",
    "clocks.mem": "2619",
    "temperature.gpu": "55",
    "clocks_throttle_reasons.active": "0x0000000000000004",
}


class FakeSmi:
    """The program in a directory; ``behave`` changes what it does from its next start."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._behaviour: dict[str, object] = {"fields": sorted(NEW), "values": VALUES, "devices": devices(1)}
        directory.mkdir(parents=True, exist_ok=True)
        program = directory / "nvidia-smi"
        program.write_text(PROGRAM.replace("{python}", sys.executable))
        program.chmod(0o755)
        self.behave()

    def behave(self, **changes: object) -> None:
        """Behave so: ``fields``, ``devices``, ``values``, ``stderr``, ``code`` and others."""
        self._behaviour |= {
            key: sorted(value) if isinstance(value, set) else value for key, value in changes.items()
        }
        (self.directory / "behaviour.new").write_text(json.dumps(self._behaviour))
        (self.directory / "behaviour.new").replace(self.directory / "behaviour.json")

    @property
    def asked(self) -> list[str]:
        """The words of each start."""
        return (self.directory / "asked").read_text().splitlines()


def devices(count: int, **values: str) -> list[dict[str, str]]:
    """So many equal devices; ``values`` are those of the last one."""
    listed = [{"index": str(i), "uuid": f"GPU-{'abcd'[i] * 2}"} for i in range(count)]
    listed[-1].update(values)
    return listed
