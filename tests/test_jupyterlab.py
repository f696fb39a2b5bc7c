"""A notebook in JupyterLab, as a user sees it in a browser: cells are run, their outputs read.

With DOCS_SCREENSHOTS=1, `docs/notebook.png` is the picture that is taken.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, eventually, python_path

pytestmark = pytest.mark.slow

SERVER_SECONDS = 60
CELL_SECONDS = 100
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1000,1200",
)

CELLS = [
    """\
import time
import rayrpc as rpc

workers = rpc.start_workers(["alice", "bob"])
workers""",
    """\
def count(what):
    for number in range(5):
        print(what, number)
        time.sleep(0.3)
    return number

future = rpc.rpc_async("alice", count, args=("prints here, though cells that follow run:",))""",
    """\
rpc.rpc_sync("bob", print, args=("meanwhile",))
future""",
    """\
def train():
    from tqdm.auto import trange
    for step in trange(20):
        time.sleep(0.05)

rpc.rpc_sync("bob", train)""",
    "future.wait()",
    """\
def divide(x):
    return x / 0

rpc.rpc_sync("alice", divide, args=(1,))""",
    "rpc.shutdown()",
]


@pytest.fixture
def server(ray_cluster, tmp_path):
    """Start JupyterLab with a notebook of ``CELLS``; return the notebook's address."""
    pytest.importorskip("jupyterlab")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in CELLS])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    (tmp_path / "files").mkdir()
    nbformat.write(notebook, tmp_path / "files" / "workers.ipynb")
    overrides = tmp_path / "CONFIG" / "labconfig" / "default_setting_overrides.json"
    overrides.parent.mkdir(parents=True)
    notices = {"fetchNews": "false", "checkForUpdates": False}
    overrides.write_text(json.dumps({"@jupyterlab/apputils-extension:notification": notices}))
    token = secrets.token_hex(16)
    environ = {
        **os.environ,
        "PYTHONPATH": python_path(ROOT),
        "IPYTHONDIR": str(tmp_path / "ipython"),
        **{f"JUPYTER_{kind}_DIR": str(tmp_path / kind) for kind in ("CONFIG", "DATA", "RUNTIME")},
    }
    arguments = {
        "ServerApp.open_browser": "False",
        "ServerApp.allow_root": "True",
        "ServerApp.port": "0",
        "ServerApp.root_dir": str(tmp_path / "files"),
        "IdentityProvider.token": token,
    }
    command = [sys.executable, "-m", "jupyterlab"]
    command += [f"--{name}={value}" for name, value in arguments.items()]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
    try:

        def info():
            for path in (tmp_path / "RUNTIME").glob("jpserver-*.json"):
                with contextlib.suppress(ValueError):  # it is being written
                    return json.loads(path.read_text())
            return None

        assert eventually(info, SERVER_SECONDS), (tmp_path / "log").read_text()
        yield f"{info()['url']}doc/tree/workers.ipynb?reset&token={token}"
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait(10)


@pytest.fixture
def browser(tmp_path):
    webdriver = pytest.importorskip("selenium.webdriver")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("there is no Chromium with its chromedriver (Debian: chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for option in (*BROWSER_OPTIONS, f"--user-data-dir={tmp_path / 'browser'}"):
        options.add_argument(option)
    service = webdriver.chrome.service.Service(driver)
    with webdriver.Chrome(options=options, service=service) as opened:
        opened.set_page_load_timeout(SERVER_SECONDS)
        yield opened


# In one script each: JupyterLab replaces elements while it renders.


def texts(browser, selector):
    script = "return [...document.querySelectorAll(arguments[0])].map(each => each.innerText)"
    return [text.strip() for text in browser.execute_script(script, selector)]


def outputs(browser):
    """Return the texts of the outputs of each cell."""
    script = """
        return [...document.querySelectorAll(".jp-CodeCell")].map(cell =>
            [...cell.querySelectorAll(".jp-OutputArea-output")].map(each => each.innerText))
    """
    return [[text.strip() for text in cell] for cell in browser.execute_script(script)]


def run_cell(browser):
    """Run the cell that has the focus, which goes on to the next one; do not wait."""
    webdriver = pytest.importorskip("selenium.webdriver")
    shift, enter = webdriver.Keys.SHIFT, webdriver.Keys.ENTER
    webdriver.ActionChains(browser).key_down(shift).send_keys(enter).key_up(shift).perform()


def test_cells_show_what_their_calls_print_and_raise(server, browser):
    browser.get(server)

    def has_run(count):
        prompts = texts(browser, ".jp-CodeCell .jp-InputArea-prompt")[:count]
        return len(prompts) == count and all(re.match(r"\[\d+\]:", each) for each in prompts)

    def is_ready():
        idle = browser.find_elements("css selector", '[data-status="idle"]')
        return idle and len(texts(browser, ".jp-CodeCell")) == len(CELLS)

    assert eventually(is_ready, SERVER_SECONDS)
    browser.find_element("css selector", ".jp-CodeCell .cm-content").click()
    for _ in CELLS[:-2]:
        run_cell(browser)
    assert eventually(lambda: has_run(len(CELLS) - 2), CELL_SECONDS), outputs(browser)
    table, counted, meanwhile, bar, value, *_ = outputs(browser)
    if os.environ.get("DOCS_SCREENSHOTS"):
        browser.save_screenshot(str(ROOT / "docs" / "notebook.png"))
    assert re.search(r"\d\s+alice\s", table[-1]) and re.search(r"\d\s+bob\s", table[-1])
    said = "(alice) prints here, though cells that follow run:"
    assert counted == ["\n".join(f"{said} {number}" for number in range(5))]
    assert meanwhile[0] == "(bob) meanwhile"
    assert re.fullmatch(r"<Future of .*count.*: pending for [\d.]+ s>", meanwhile[1])
    assert re.fullmatch(r"\(bob\) 100%\|.+\| 20/20 \[.*\]", bar[0]), bar
    assert value == ["4"]

    run_cell(browser)
    assert eventually(lambda: has_run(len(CELLS) - 1), CELL_SECONDS), outputs(browser)
    (shown,) = outputs(browser)[-2]
    assert shown.count("ZeroDivisionError: division by zero") == 1
    assert "in divide\n    return x / 0\n" in shown

    run_cell(browser)
    assert eventually(lambda: has_run(len(CELLS)), CELL_SECONDS), outputs(browser)
