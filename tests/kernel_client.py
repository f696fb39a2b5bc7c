"""Run the cells of a JSON file in a Jupyter kernel; write what each has shown as JSON.

A frontend shows a message in the cell whose request it names, also after that cell has ended.
Each output is a pair: "stdout", "stderr", "result" or "error", and its text.

Usage: python kernel_client.py CELLS.json OUTPUTS.json
"""

import json
import queue
import re
import sys
import time

from jupyter_client.manager import start_new_kernel

CELL_SECONDS = 100
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def output_of(message):
    content = message["content"]
    match message["msg_type"]:
        case "stream":
            return content["name"], content["text"]
        case "error":
            return "error", "\n".join(content["traceback"])
        case "execute_result":
            return "result", content["data"]["text/plain"]
    return None


def run(cells):
    manager, client = start_new_kernel(startup_timeout=CELL_SECONDS)
    outputs = [[] for _ in cells]
    numbers = {}
    try:
        for number, cell in enumerate(cells):
            request = client.execute(cell)
            numbers[request] = number
            deadline = time.monotonic() + CELL_SECONDS
            while time.monotonic() < deadline:
                try:
                    message = client.get_iopub_msg(timeout=1)
                except queue.Empty:
                    continue
                parent = message["parent_header"].get("msg_id")
                output = output_of(message)
                if output is not None and parent in numbers:
                    kind, text = output
                    outputs[numbers[parent]].append((kind, COLOURS.sub("", text)))
                is_idle = message["content"].get("execution_state") == "idle"
                if parent == request and is_idle:
                    break
            else:
                raise TimeoutError(f"cell {number} did not end: {outputs}")
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
    return outputs


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        shown = run(json.load(file))
    with open(sys.argv[2], "w") as file:
        json.dump(shown, file)
