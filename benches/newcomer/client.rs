//! The measuring end: each path in a loop.

use std::time::{Duration, Instant};

use super::path::{Cell, Path};
use super::server::ServerProcess;
use super::{calls, naps, tensors};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Measured {
    /// Time for each operation: the loop's, divided by its turns.
    pub(crate) micros: f64,
    /// Waits that only the safety net ended, in both processes.
    pub(crate) naps: u64,
}

/// Turns before the clock starts.
const WARM: u64 = 100;

/// Measures `cell` for `duration`.
pub(crate) fn run(cell: Cell, duration: Duration) -> Measured {
    let mut server = ServerProcess::start(cell);
    let addresses = server.addresses();
    naps::begin();
    let micros = cell.runtime.run(async {
        match cell.path {
            Path::GrpcTcp | Path::GrpcRdma => calls::greeter(cell, &addresses, duration).await,
            Path::PutTcp | Path::Gather | Path::Pool => calls::put(cell, &addresses, duration).await,
            Path::Static | Path::Static2 => tensors::fixed(cell, &addresses, duration).await,
            Path::Dynamic => tensors::dynamic(cell, &addresses, duration).await,
            Path::Rendezvous => tensors::rendezvous(&addresses, duration).await,
            Path::Memcpy => tensors::memcpy(cell, &addresses, duration).await,
            Path::Notice => tensors::notice(cell, &mut server, duration).await,
        }
    });
    Measured { micros, naps: naps::counted() + server.end() }
}

/// Calls `turn` with one step after the other for as long as is asked; microseconds a turn.
pub(crate) async fn repeat(duration: Duration, mut turn: impl AsyncFnMut(u64)) -> f64 {
    let mut step = 0;
    while step < WARM {
        turn(step).await;
        step += 1;
    }
    let start = Instant::now();
    while start.elapsed() < duration {
        turn(step).await;
        step += 1;
    }
    start.elapsed().as_secs_f64() * 1e6 / (step - WARM) as f64
}
