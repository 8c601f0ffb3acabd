//! The messages between this process and its children: a line of JSON each, over the children's stdin and stdout.

use std::io::{self, BufRead, Write};
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::parameter_server::load::Computing;
use crate::parameter_server::mode::TransferMode;
use tonic_rdma_commands::Failure;
use tonic_rdma_payload::content::VARIANTS;
use tonic_rdma_payload::reduce::Reduced;

/// A command to a child.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ChildCommand {
    /// To the server: attach to the slots of the workers' devices, which listen at these addresses.
    Attach { workers: Vec<String> },
    /// Carry out a turn.
    Turn(TurnRequest),
    /// To the server: the workers have ended the turn; report its result.
    Collect,
}

/// A turn: some mini-batches in one mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TurnRequest {
    pub(crate) mode: TransferMode,
    /// The number of the first mini-batch.
    pub(crate) first: u64,
    /// The number of mini-batches.
    pub(crate) steps: u32,
    /// Whether receivers check every byte.
    pub(crate) every_byte: bool,
    /// What workers do between pull and push.
    pub(crate) computing: Computing,
}

impl Sent {
    /// Makes the description of tensors that have these results of consuming, for each variant.
    pub(crate) fn new(reduced: [Reduced; VARIANTS]) -> Self {
        let maxima = reduced.map(|variant| variant.maximum.to_bits());
        Self { maxima, digests: reduced.map(|variant| variant.digest) }
    }
}

impl TurnRequest {
    /// Returns the numbers of the turn's mini-batches.
    pub(crate) fn numbers(&self) -> std::ops::Range<u64> {
        self.first..self.first + u64::from(self.steps)
    }
}

/// A report of a child.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Report {
    Ready(Ready),
    Attached,
    Done(Done),
    /// The child can't continue: the reason, and whether the command line is wrong.
    Failed {
        reason: String,
        usage: bool,
    },
}

impl Report {
    /// Returns the report of a child that is ready, or the report itself if it is another one.
    pub(crate) fn ready(self) -> Result<Ready, Box<Self>> {
        match self {
            Self::Ready(ready) => Ok(ready),
            other => Err(Box::new(other)),
        }
    }

    /// Succeeds for the report of a server that is attached. Returns any other report.
    pub(crate) fn attached(self) -> Result<(), Box<Self>> {
        match self {
            Self::Attached => Ok(()),
            other => Err(Box::new(other)),
        }
    }

    /// Returns the result of a turn, or the report itself if it is another one.
    pub(crate) fn done(self) -> Result<Done, Box<Self>> {
        match self {
            Self::Done(done) => Ok(done),
            other => Err(Box::new(other)),
        }
    }
}

/// The report of a child that is ready for turns.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Ready {
    /// Address of the server's gRPC over TCP.
    pub(crate) tcp: Option<SocketAddr>,
    pub(crate) rdma: Option<SocketAddr>,
    /// Address of the listener whose answers go by reference.
    pub(crate) rdma_gather: Option<SocketAddr>,
    /// Address of the listener for native calls, and of the one that also sends and lands tensors by reference.
    pub(crate) native: Option<SocketAddr>,
    pub(crate) native_gather: Option<SocketAddr>,
    /// Address of the tensor device.
    pub(crate) device: Option<String>,
    /// The provider that a worker uses, such as `soft`.
    pub(crate) provider: Option<String>,
    /// The tensors that this child sends: a worker's gradients for each server, or a server's variables.
    pub(crate) sent: Vec<Sent>,
    /// Whether the process is pinned to the core that it was given.
    pub(crate) pinned: bool,
}

/// The result that the consuming of tensors must have.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sent {
    /// Bits of the largest element, for each variant.
    pub(crate) maxima: [u32; VARIANTS],
    /// Digest of all elements, for each variant.
    pub(crate) digests: [u64; VARIANTS],
}

/// The result of a turn.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Done {
    /// Time of each mini-batch, at a worker.
    pub(crate) nanos: Vec<u64>,
    /// User and system time that the process used.
    pub(crate) cpu_nanos: u64,
    /// Bits of the largest element that was received, if anything was consumed.
    pub(crate) maximum: Option<u32>,
    /// Sum of the digests of everything that was received, if it was consumed.
    pub(crate) digest: Option<u64>,
    /// Number of tensors that were checked.
    pub(crate) checked: u64,
}

/// Receives the commands of the parent. The process ends when the parent does.
pub(crate) fn receive_commands() -> Result<mpsc::UnboundedReceiver<ChildCommand>, Failure> {
    let (sender, receiver) = mpsc::unbounded_channel();
    let listen = move || {
        for line in io::stdin().lock().lines() {
            let Ok(line) = line else { break };
            let Ok(command) = serde_json::from_str(&line) else { break };
            if sender.send(command).is_err() {
                break;
            }
        }
        #[expect(clippy::disallowed_methods, reason = "the parent is gone, and nothing waits for an answer")]
        std::process::exit(0)
    };
    let thread = std::thread::Builder::new().name("commands".to_owned()).spawn(listen);
    thread.map_err(|error| Failure::run("can't start a thread").because(error))?;
    Ok(receiver)
}

/// Sends a report to the parent.
pub(crate) fn send_report(report: &Report) -> Result<(), Failure> {
    let line = serde_json::to_string(report)
        .map_err(|error| Failure::run("can't make JSON of a report").because(error))?;
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{line}").and_then(|()| stdout.flush()).map_err(|error| Failure::output(&error))
}

/// Reports a failure to the parent, which shows it. A second report here would repeat it.
pub(crate) fn report_failure(result: Result<(), Failure>) -> Result<(), Failure> {
    match result {
        Err(failure @ (Failure::Run { .. } | Failure::Usage { .. })) => {
            let usage = failure.is_usage();
            send_report(&Report::Failed { reason: failure.with_causes(), usage })
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;
    use crate::parameter_server::load::Compute;

    #[test]
    fn messages_are_read_back_and_take_one_line() {
        let computing = Computing { compute: Compute::Wait, nanos: 1 };
        let turn =
            TurnRequest { mode: TransferMode::RdmaCp, first: 7, steps: 3, every_byte: true, computing };
        assert_eq!(turn.numbers(), 7..10);
        for command in [ChildCommand::Attach { workers: vec!["a:1".to_owned()] }, ChildCommand::Turn(turn)] {
            let line = serde_json::to_string(&command).unwrap();
            assert!(!line.contains('\n'));
            assert_eq!(serde_json::from_str::<ChildCommand>(&line).unwrap(), command);
        }
        let failed = Report::Failed { reason: "two\nlines".to_owned(), usage: false };
        let sent = vec![Sent { maxima: [f32::NAN.to_bits(); VARIANTS], ..Sent::default() }];
        let ready = Report::Ready(Ready { sent, ..Ready::default() });
        for report in [failed, ready, Report::Attached, Report::Done(Done::default())] {
            let line = serde_json::to_string(&report).unwrap();
            assert!(!line.contains('\n'));
            assert_eq!(serde_json::from_str::<Report>(&line).unwrap(), report);
        }
    }
}
