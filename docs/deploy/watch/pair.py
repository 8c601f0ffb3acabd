"""Prometheus, and processes of this repository that it watches, for the programs of this folder.

Prometheus is the one on the PATH, else Debian's package: it is unpacked below `target` and not installed, so no service is started. Intervals
of rules are divided by SCALE, so that the same expressions fire within seconds: 10 minutes are 10 seconds.
"""
import json, math, os, re, resource, shutil, signal, socket, subprocess, time, urllib.parse, urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve()
SCALE = 60


class Skipped(Exception):
    """What can't be checked here, and why."""


def tools():
    """Returns the paths of prometheus and promtool."""
    folder = TARGET / "tools" / "prometheus"
    for place in (None, str(folder / "usr/bin")):
        found = [shutil.which(name, path=place) for name in ("prometheus", "promtool")]
        if all(found):
            return found
    if not shutil.which("apt-get"):
        raise Skipped("there is no prometheus, and no apt-get to get Debian's package")
    folder.mkdir(parents=True, exist_ok=True)
    download = ["apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", "prometheus"]
    quiet = {"cwd": folder, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    if subprocess.run(download, **quiet).returncode != 0:
        # A fresh container has no lists of packages.
        subprocess.run(["apt-get", "update", "-qq"], **quiet)
        if subprocess.run(download, **quiet).returncode != 0:
            raise Skipped("Debian's package prometheus can't be downloaded")
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, folder], check=True)
        package.unlink()
    return [str(folder / "usr/bin" / name) for name in ("prometheus", "promtool")]


def programs(folder=None):
    """Returns the paths of the example `watched` and of the command. Builds them, unless the folder has them."""
    if folder is None:
        for what in (["--example", "watched"], ["-p", "tonic-rdma-cli"]):
            subprocess.run(["cargo", "build", "--quiet", *what], cwd=ROOT, check=True)
        folder = TARGET / "debug"
    return Path(folder) / "examples" / "watched", Path(folder) / "tonic-rdma"


def free_port():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return unused.getsockname()[1]


def scaled(rules, scale=SCALE):
    """Divides the intervals of rules: ranges, offsets and `for`."""
    def shorter(match):
        seconds = int(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]
        return f"{1000 * seconds // scale}ms"
    return re.sub(r"(?:(?<=\[)|(?<=offset )|(?<=for: ))(\d+)([smh])\b", shorter, rules)


def wait_until(what, condition, limit=120):
    """Returns the first true result of the condition, which it tries several times a second."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if result := condition():
            return result
        time.sleep(0.2)
    raise TimeoutError(f"not within {limit} s: {what}")


class Prometheus:
    """A server that scrapes targets twice a second: pairs of a job and an address."""

    def __init__(self, folder, targets, rules=None, port=0):
        folder = Path(folder)
        self.url = f"http://127.0.0.1:{port or free_port()}"
        (folder / "rules.yaml").write_text(rules or "groups: []\n")
        jobs = {job: [address for owner, address in targets if owner == job] for job, _ in targets}
        scrapes = [{"job_name": job, "static_configs": [{"targets": addresses}]} for job, addresses in jobs.items()]
        times = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
        # JSON is YAML.
        (folder / "prometheus.yaml").write_text(json.dumps({"global": times, "rule_files": ["rules.yaml"], "scrape_configs": scrapes}))
        self.log = folder / "prometheus.log"
        self.process = subprocess.Popen(
            [tools()[0], f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data", "--query.lookback-delta=5s",
             f"--web.listen-address={self.url.removeprefix('http://')}", "--log.level=warn"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self.log.open("w"), start_new_session=True)
        wait_until("Prometheus is ready", self.is_ready)

    def is_ready(self):
        if self.process.poll() is not None:
            raise RuntimeError(f"Prometheus has ended: {self.log.read_text()}")
        try:
            return urllib.request.urlopen(f"{self.url}/-/ready", timeout=10).status == 200
        except OSError:
            return False

    def get(self, path, **parameters):
        """Returns the data of an answer of Prometheus' API."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters, doseq=True)}"
        try:
            return json.load(urllib.request.urlopen(url, timeout=60))["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error)["error"]) from None

    def query(self, expression):
        """Returns the present series, as pairs of labels and value."""
        return [(series["metric"], float(series["value"][1])) for series in self.get("query", query=expression)["result"]]

    def range(self, expression, seconds):
        """Returns the series of the last seconds, as pairs of labels and values. Leaves out what is no number."""
        now = time.time()
        answer = self.get("query_range", query=expression, start=now - seconds, end=now, step="1s")["result"]
        series = [(one["metric"], [float(value) for _, value in one["values"]]) for one in answer]
        series = [(labels, [value for value in values if math.isfinite(value)]) for labels, values in series]
        return [(labels, values) for labels, values in series if values]

    def firing(self):
        """Returns the alerts that fire now: their labels and annotations."""
        return [(alert["labels"], alert["annotations"]) for alert in self.get("alerts")["alerts"] if alert["state"] == "firing"]

    def stop(self):
        self.process.kill()
        self.process.wait()


class Child:
    """A process whose output goes to a file. Variables named RDMA_ count only if they are given."""

    def __init__(self, command, log, env=(), descriptors=None):
        self.command, self.log = [str(word) for word in command], Path(log)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RDMA_")}
        # As in .cargo/config.toml: processes of one user share memory, also where the kernel does not let them trace one another.
        own = {"RDMA_SOFT_PEERS": "trusted-user", "RDMA_HISTOGRAMS": "yes"} | dict(env)

        def limit():
            if descriptors:
                resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
        with self.log.open("a") as out:
            self.process = subprocess.Popen(self.command, env=inherited | own, stdin=subprocess.PIPE, stdout=out, stderr=out, text=True,
                                            start_new_session=True, preexec_fn=limit)

    def tell(self, line):
        """Changes settings of an example `watched`."""
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def signal(self, what):
        self.process.send_signal(what)

    def end(self):
        """Lets it end by itself, as its stdin ends, or else kills it."""
        try:
            self.process.stdin.close()
            self.process.send_signal(signal.SIGCONT)
            self.process.wait(timeout=5)
        except (OSError, subprocess.TimeoutExpired):
            self.kill()

    def kill(self):
        self.process.kill()
        self.process.wait()


def panels(dashboard=HERE / "dashboard.json"):
    """Returns the queries of the dashboard: title of the panel, expression, legend."""
    for panel in json.loads(Path(dashboard).read_text())["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"], target.get("legendFormat", "")


def filled(expression, job=".+", instance=".+"):
    """Puts in what Grafana puts in for its variables."""
    values = {"$__rate_interval": "5s", "$__range": "60s", "$job": job, "$instance": instance}
    for name, value in values.items():
        expression = expression.replace(name, value)
    return expression
