//! The signals that end a program.

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::failure::{Context as _, Failure};

/// SIGINT and SIGTERM. They don't end the process any more.
#[derive(Debug)]
pub struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    /// Listens for signals, within a runtime.
    ///
    /// # Errors
    ///
    /// Fails if the system refuses it.
    pub fn new() -> Result<Self, Failure> {
        let listen = |kind| signal(kind).context("can't listen for signals");
        Ok(Self { interrupt: listen(SignalKind::interrupt())?, terminate: listen(SignalKind::terminate())? })
    }

    /// Waits for the next signal. Returns the failure of a program that it ends.
    pub async fn next(&mut self) -> Failure {
        tokio::select! {
            _ = self.interrupt.recv() => Failure::Interrupted,
            _ = self.terminate.recv() => "terminated".into(),
        }
    }
}
