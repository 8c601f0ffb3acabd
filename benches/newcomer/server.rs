//! The server process: this binary, started again, which serves until its standard input ends.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use tokio::sync::mpsc;

use super::path::{Cell, Path};
use super::runtimes::Flavour;
use super::{late_waits, serving};

/// First argument of the server process.
pub(crate) const ARGUMENT: &str = "server";

/// The addresses of the services.
#[derive(Clone, Debug)]
pub(crate) struct Addresses {
    pub(crate) tcp: String,
    pub(crate) rdma: String,
    pub(crate) device: String,
}

/// A handle to the server process.
pub(crate) struct ServerProcess {
    process: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    addresses: Addresses,
}

impl ServerProcess {
    pub(crate) fn start(cell: Cell) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args([ARGUMENT, cell.runtime.name(), cell.path.name(), &cell.bytes.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = process.stdin.take();
        let mut output = BufReader::new(process.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let mut words = line.split_whitespace().map(str::to_owned);
        let mut word = || words.next().expect("the server names its addresses");
        let addresses = Addresses { tcp: word(), rdma: word(), device: word() };
        Self { process, input, output, addresses }
    }

    pub(crate) fn addresses(&self) -> Addresses {
        self.addresses.clone()
    }

    /// Sends a line to the server process.
    pub(crate) fn send_line(&mut self, line: &str) {
        writeln!(self.input.as_mut().unwrap(), "{line}").unwrap();
    }

    /// Ends the server process. Returns its count of late waits.
    pub(crate) fn end(mut self) -> u64 {
        drop(self.input.take());
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        assert!(self.process.wait().unwrap().success(), "the server failed");
        line.trim().parse().expect("the count of late waits")
    }
}

/// Runs the server process.
pub(crate) fn run(arguments: &[String]) {
    let [runtime, path, bytes] = arguments else { panic!("server RUNTIME PATH BYTES, not {arguments:?}") };
    let (path, bytes) = (Path::from_name(path), bytes.parse().unwrap());
    let (lines, received) = mpsc::unbounded_channel();
    let (sender, ended) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            let _ = lines.send(line);
        }
        let _ = sender.send(());
    });
    late_waits::begin();
    Flavour::from_name(runtime).run(async {
        tokio::select! {
            () = serving::serve(path, bytes, received) => {}
            _ = ended => {}
        }
    });
    println!("{}", late_waits::count());
}
