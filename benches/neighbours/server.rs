//! The server process: a service that takes payloads, and checks them. Starts the processes of a cell, and
//! reads their resources.

use std::fmt::Display;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

use super::cell::Transport;
use tonic_rdma::RdmaIncoming;
use tonic_rdma_commands::Flavour;
use tonic_rdma_commands::process::{self, Child, end_with_stdin, report_line};
use tonic_rdma_proto::transfer::transfer_server::{Transfer, TransferServer};
use tonic_rdma_proto::transfer::{PutReply, PutRequest};

/// Number of calls served.
static SERVED: AtomicU64 = AtomicU64::new(0);

/// Bytes of the longest message.
const LIMIT: usize = 64 << 20;

/// Serves until the parent process ends.
pub(crate) fn run(transport: Transport, runtime: Flavour) {
    end_with_stdin(|| print_line(SERVED.load(SeqCst))).unwrap();
    runtime.build().unwrap().block_on(async {
        let service = TransferServer::new(PayloadService).max_decoding_message_size(LIMIT);
        let router = Server::builder().add_service(service);
        match transport {
            Transport::Tcp => {
                let incoming =
                    TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap().with_nodelay(Some(true));
                print_line(incoming.local_addr().unwrap());
                router.serve_with_incoming(incoming).await.unwrap();
            }
            Transport::Rdma => {
                let incoming = RdmaIncoming::bind("127.0.0.1:0").await.unwrap();
                print_line(incoming.local_addr());
                router.serve_with_incoming(incoming).await.unwrap();
            }
        }
    });
}

/// Prints a line for the parent process, which may have ended.
pub(crate) fn print_line(line: impl Display) {
    let _ = report_line(line);
}

/// Returns a payload with `seed` in each word.
pub(crate) fn payload(bytes: usize, seed: u64) -> Vec<u8> {
    let mut payload = seed.to_le_bytes().repeat(bytes.div_ceil(size_of::<u64>()));
    payload.truncate(bytes);
    payload
}

/// Returns whether these are the bytes of [`payload`]. It takes much less time than a transfer, so that the
/// bench measures transfers.
fn is_payload(bytes: &[u8], seed: u64) -> bool {
    let (words, rest) = bytes.as_chunks();
    let differences =
        words.iter().fold(0, |differences, word| differences | (u64::from_le_bytes(*word) ^ seed));
    differences == 0 && seed.to_le_bytes().starts_with(rest)
}

/// Takes payloads of [`payload`], and checks each byte.
struct PayloadService;

#[tonic::async_trait]
impl Transfer for PayloadService {
    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutReply>, Status> {
        let PutRequest { seed, payload, .. } = request.into_inner();
        if !is_payload(&payload, seed) {
            return Err(Status::data_loss("another payload than was sent"));
        }
        SERVED.fetch_add(1, SeqCst);
        Ok(Response::new(PutReply { bytes: payload.len() as u64, ..Default::default() }))
    }
}

/// The longest time for a process to say something.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// Starts a process. Returns the process, and the first line that it prints, or why there is none.
pub(crate) fn start(arguments: &[&str]) -> (Child, String) {
    let mut command = process::again().unwrap();
    command.args(arguments);
    let mut process = Child::with_lines(arguments[0], command).unwrap();
    let line = process.line(TIMEOUT).unwrap_or_else(|failure| failure.with_causes());
    (process, line)
}

/// The most that a process held: memory in KiB, descriptors and mappings.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Resources {
    pub(crate) resident_kib: u64,
    pub(crate) descriptors: u64,
    pub(crate) mappings: u64,
}

impl Resources {
    /// Returns what the process `id` holds now; zeros if the process is gone.
    pub(crate) fn by(id: u32) -> Self {
        let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap_or_default();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let resident = resident.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok());
        let maps = std::fs::read_to_string(format!("/proc/{id}/maps")).unwrap_or_default();
        Self {
            resident_kib: resident.unwrap_or_default(),
            descriptors: std::fs::read_dir(format!("/proc/{id}/fd"))
                .map_or(0, |entries| entries.count() as u64),
            mappings: maps.lines().count() as u64,
        }
    }

    /// Returns the greater of each number.
    pub(crate) fn max(self, other: Self) -> Self {
        Self {
            resident_kib: self.resident_kib.max(other.resident_kib),
            descriptors: self.descriptors.max(other.descriptors),
            mappings: self.mappings.max(other.mappings),
        }
    }

    /// Returns what is above `before` and `more`, if anything is.
    pub(crate) fn above(self, before: Self, more: Self) -> Option<String> {
        let above = self.resident_kib > before.resident_kib + more.resident_kib
            || self.descriptors > before.descriptors + more.descriptors
            || self.mappings > before.mappings + more.mappings;
        above.then(|| format!("the server held {self:?}, {before:?} before, and may hold {more:?} more"))
    }
}
