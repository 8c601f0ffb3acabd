//! Bridges as processes, and the clients and servers at their ends.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use socket2::{Domain, SockAddr, Type};
use xxhash_rust::xxh3::Xxh3;

use super::process::tonic_rdma;

/// Time for any step. A step that takes longer hangs.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// The variable that names the device of the bridges (feature `ibverbs`). Without it they use the software
/// device.
const DEVICE: &str = "RDMA_TEST_DEVICE";

/// A running bridge, ended on drop.
pub(crate) struct Bridge {
    child: Child,
    /// The address that its first route listens on.
    pub(crate) address: String,
    lines: mpsc::Receiver<String>,
    stderr: Arc<Mutex<String>>,
}

impl Bridge {
    pub(crate) fn start(listen: &str, connect: &str, more: &[&str]) -> Self {
        Self::start_with(listen, connect, more, &[])
    }

    pub(crate) fn start_with(listen: &str, connect: &str, more: &[&str], variables: &[(&str, &str)]) -> Self {
        let mut command = command(&["--listen", listen, "--connect", connect, "--metrics", "127.0.0.1:0"]);
        command.args(more).envs(variables.iter().copied()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let stderr = collect(child.stderr.take().unwrap());
        let (sender, lines) = mpsc::channel();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            stdout.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)).ok();
        });
        let mut bridge = Self { child, address: String::new(), lines, stderr };
        bridge.address = bridge.another_route();
        bridge
    }

    /// Returns the address that the next route listens on.
    pub(crate) fn another_route(&self) -> String {
        let line = self.lines.recv_timeout(TIMEOUT).unwrap_or_default();
        listening(&line).unwrap_or_else(|| panic!("{line:?} {}", self.log()))
    }

    /// Connects a client over TCP.
    pub(crate) fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address.split_once("://").unwrap().1).unwrap();
        prepare(&stream);
        stream
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn signal(&self, name: &str) {
        let sent =
            Command::new("kill").args([&format!("-{name}"), &self.child.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }

    /// Waits until the bridge has ended by itself, and returns its exit status.
    pub(crate) fn ended(&mut self) -> Option<i32> {
        eventually("it has ended", || self.child.try_wait().unwrap().is_some());
        self.child.wait().unwrap().code()
    }

    /// Waits until `text` is on stderr.
    pub(crate) fn logs(&self, text: &str) {
        eventually(&format!("{text:?} on stderr"), || self.stderr.lock().unwrap().contains(text));
    }

    /// Returns the text on stderr so far.
    pub(crate) fn log(&self) -> String {
        self.stderr.lock().unwrap().clone()
    }

    /// Returns the sum over all metrics whose line contains `what`.
    pub(crate) fn metric(&self, what: &str) -> f64 {
        self.metric_of(what, "")
    }

    /// Returns the sum over all metrics whose line contains `what` and `label`.
    pub(crate) fn metric_of(&self, what: &str, label: &str) -> f64 {
        let all = self.http("GET /metrics");
        let values =
            all.lines().filter(|line| !line.starts_with('#') && line.contains(what) && line.contains(label));
        values.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }

    /// Returns the answer to a request, with its head.
    pub(crate) fn http(&self, request: &str) -> String {
        self.logs("metrics at http://");
        let log = self.log();
        let address = log.split("metrics at http://").nth(1).unwrap().split('/').next().unwrap();
        let mut stream = TcpStream::connect(address).unwrap();
        prepare(&stream);
        write!(stream, "{request} HTTP/1.1\r\nhost: bridge\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// Returns the resident memory of the bridge in bytes.
    pub(crate) fn resident(&self) -> u64 {
        let pages = std::fs::read_to_string(format!("/proc/{}/statm", self.child.id())).unwrap();
        pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
    }

    /// Returns the CPU time of the bridge, in hundredths of a second.
    pub(crate) fn cpu_ticks(&self) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        let fields: Vec<_> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    }
}

impl Drop for Bridge {
    /// Asks the bridge to end, so that it removes its files. Kills it after some seconds.
    fn drop(&mut self) {
        for _ in 0..2 {
            let _ = Command::new("kill")
                .args(["-TERM", &self.child.id().to_string()])
                .stderr(Stdio::null())
                .status();
            std::thread::sleep(Duration::from_millis(20));
        }
        let until = Instant::now() + Duration::from_secs(5);
        while Instant::now() < until && self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn command(arguments: &[&str]) -> Command {
    let mut command = tonic_rdma(&[&["bridge"], arguments].concat());
    if let Ok(device) = std::env::var(DEVICE) {
        command.envs([("RDMA_PROVIDER", "ibverbs"), ("RDMA_DEVICE", &device)]);
    }
    command.env_remove("RUST_LOG").env_remove("NOTIFY_SOCKET");
    command
}

/// Returns the stderr of a bridge that does not start, and ends by itself.
pub(crate) fn stopped(arguments: &[&str]) -> String {
    let mut command = command(arguments);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let (mut child, until) = (command.spawn().unwrap(), Instant::now() + TIMEOUT);
    while Instant::now() < until && child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(5));
    }
    // A bridge that runs on is killed, so it has no exit status.
    let _ = child.kill();
    let output = child.wait_with_output().unwrap();
    assert!(matches!(output.status.code(), Some(1 | 2)), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

fn listening(line: &str) -> Option<String> {
    Some(line.strip_prefix("listening on ")?.split_once(", connecting to ")?.0.to_owned())
}

/// Collects lines in a thread.
fn collect(from: impl Read + Send + 'static) -> Arc<Mutex<String>> {
    let text = Arc::new(Mutex::new(String::new()));
    let gathered = Arc::clone(&text);
    std::thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            let mut text = gathered.lock().unwrap();
            text.push_str(&line);
            text.push('\n');
        }
    });
    text
}

/// Two bridges with RDMA between them, and a server of the test behind the second.
pub(crate) struct BridgePair {
    pub(crate) near: Bridge,
    pub(crate) far: Bridge,
    accepted: Option<mpsc::Receiver<TcpStream>>,
}

impl BridgePair {
    pub(crate) fn new() -> Self {
        let (server, accepted) = spawn_sink();
        Self { accepted: Some(accepted), ..Self::to(&server) }
    }

    pub(crate) fn to(server: &str) -> Self {
        // No limit that a slow machine could reach.
        const MORE: [&str; 4] = ["--policy", "require", "--connect-timeout", "3600"];
        let far = Bridge::start("rdma://127.0.0.1:0", &format!("tcp://{server}"), &MORE);
        let near = Bridge::start("tcp://127.0.0.1:0", &far.address, &MORE);
        Self { near, far, accepted: None }
    }

    /// Makes a connection and returns both sides.
    pub(crate) fn connected(&self) -> (TcpStream, TcpStream) {
        let mut client = self.near.connect();
        client.write_all(b"!").unwrap();
        (client, first_that_sends(self.accepted.as_ref().unwrap()))
    }

    /// Returns the resident memory of both bridges in bytes.
    pub(crate) fn resident(&self) -> u64 {
        self.near.resident() + self.far.resident()
    }
}

/// Starts a server whose connections the test receives.
pub(crate) fn spawn_sink() -> (String, mpsc::Receiver<TcpStream>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (sender, accepted) = mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let stream = stream.unwrap();
            prepare(&stream);
            if sender.send(stream).is_err() {
                return;
            }
        }
    });
    (address, accepted)
}

/// Waits for the next connection that sends a byte, and reads this byte. Bridges also make connections
/// without a byte, to find out whether the target is reachable.
pub(crate) fn first_that_sends(accepted: &mpsc::Receiver<TcpStream>) -> TcpStream {
    loop {
        let mut server = accepted.recv_timeout(TIMEOUT).unwrap();
        if server.read(&mut [0]).unwrap() == 1 {
            return server;
        }
    }
}

/// Starts a server that sends everything back, and ends each connection after its client.
pub(crate) fn spawn_echo(address: &str) -> String {
    let listener = TcpListener::bind(address).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            std::thread::spawn(move || {
                let _ = io::copy(&mut stream.try_clone().unwrap(), &mut stream);
                let _ = stream.shutdown(Shutdown::Write);
            });
        }
    });
    address
}

/// A Unix socket with a full queue: its target is busy, and accepts nothing for now.
pub(crate) struct Busy {
    listener: socket2::Socket,
    /// The clients in the queue.
    waiting: Vec<socket2::Socket>,
}

impl Busy {
    /// Listens on `name`, which is a path, or a zero byte and an abstract name.
    pub(crate) fn new(name: &str) -> Self {
        let address = SockAddr::unix(name).unwrap();
        let socket = || socket2::Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        let listener = socket();
        listener.bind(&address).unwrap();
        listener.listen(0).unwrap();
        listener.set_read_timeout(Some(TIMEOUT)).unwrap();
        let clients = std::iter::repeat_with(socket).inspect(|client| client.set_nonblocking(true).unwrap());
        let waiting = clients.take_while(|client| client.connect(&address).is_ok()).collect();
        Self { listener, waiting }
    }

    /// Empties the queue. Returns the next client.
    pub(crate) fn accept(mut self) -> UnixStream {
        for _ in self.waiting.drain(..) {
            self.listener.accept().unwrap();
        }
        let client = self.listener.accept().unwrap().0;
        client.set_read_timeout(Some(TIMEOUT)).unwrap();
        OwnedFd::from(client).into()
    }
}

pub(crate) fn prepare(stream: &TcpStream) {
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.set_write_timeout(Some(TIMEOUT)).unwrap();
}

/// Returns random bytes of this seed.
pub(crate) fn content(length: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; length];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

/// Sends `length` bytes and the end. Returns their digest.
pub(crate) fn send(stream: &mut TcpStream, mut length: usize, seed: u64) -> u64 {
    let (mut chunk, mut digest, mut page) = (content(128 << 10, seed), Xxh3::new(), 0u64);
    while length > 0 {
        for stamped in chunk.chunks_mut(4096) {
            page += 1;
            stamped[..8].copy_from_slice(&page.to_le_bytes());
        }
        let count = length.min(chunk.len());
        digest.update(&chunk[..count]);
        stream.write_all(&chunk[..count]).unwrap();
        length -= count;
    }
    stream.shutdown(Shutdown::Write).unwrap();
    digest.digest()
}

/// Receives to the end. Returns the number of bytes and their digest.
pub(crate) fn receive(stream: &mut TcpStream) -> (usize, u64) {
    let (mut chunk, mut digest, mut total) = (vec![0; 128 << 10], Xxh3::new(), 0);
    loop {
        match stream.read(&mut chunk).unwrap() {
            0 => return (total, digest.digest()),
            count => {
                digest.update(&chunk[..count]);
                total += count;
            }
        }
    }
}

/// Waits until `condition` returns true.
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + TIMEOUT;
    while !condition() {
        assert!(Instant::now() < until, "not within {TIMEOUT:?}: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
