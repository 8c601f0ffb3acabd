//! The measuring client: each path in a loop.

use std::time::{Duration, Instant};

use super::path::{Cell, Path};
use super::server::ServerProcess;
use super::{calls, late_waits, tensors};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Measured {
    /// Microseconds of an operation: the time of the loop divided by the number of rounds.
    pub(crate) micros: f64,
    /// Waits in both processes that a timer ended.
    pub(crate) late_waits: u64,
}

/// Rounds before the clock starts.
const WARM: u64 = 100;

/// Measures `cell` for `duration`.
pub(crate) fn run(cell: Cell, duration: Duration) -> Measured {
    let mut server = ServerProcess::start(cell);
    let addresses = server.addresses();
    late_waits::begin();
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
    Measured { micros, late_waits: late_waits::count() + server.end() }
}

/// Calls `round` with increasing steps for `duration`. Returns the microseconds of a round.
pub(crate) async fn repeat(duration: Duration, mut round: impl AsyncFnMut(u64)) -> f64 {
    let mut step = 0;
    while step < WARM {
        round(step).await;
        step += 1;
    }
    let start = Instant::now();
    while start.elapsed() < duration {
        round(step).await;
        step += 1;
    }
    start.elapsed().as_secs_f64() * 1e6 / (step - WARM) as f64
}
