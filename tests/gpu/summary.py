"""A JUnit file in short: counts, what failed, and the largest differences in nats. Usage: summary.py JUNIT JSON."""

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any


def summary(junit: Path) -> dict[str, Any]:
    """Counts and seconds of the run, the names of what failed, and the largest value of each property."""
    root = ET.parse(junit).getroot()
    cases = list(root.iter("testcase"))
    failed = [case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None]
    largest: dict[str, float] = {}
    for found in root.iter("property"):
        name, value = found.get("name", ""), float(found.get("value", "nan"))
        largest[name] = max(value, largest.get(name, value))
    seconds = sum(float(suite.get("time", "0")) for suite in root.iter("testsuite"))
    return {"tests": len(cases), "failed": failed, "seconds": seconds, "largest": largest}


if __name__ == "__main__":
    found = summary(Path(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1))
