//! The tokio runtime of a program with tonic-rdma.

use std::{fmt, io};

use serde::{Deserialize, Serialize};
use tokio::runtime::{Builder, Runtime};
use tonic_rdma::runtime::idle_polling;

use crate::failure::ValueError;

/// The largest accepted number of worker threads.
const MAX_WORKERS: usize = 256;

/// A flavour of tokio's runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Flavour {
    /// Everything runs on the process's main thread, which polls completions when it has nothing else to do:
    /// [`tonic_rdma::runtime::idle_polling`].
    IdlePolling,
    /// Everything runs on the process's main thread, as tokio builds it.
    CurrentThread,
    /// Tasks run on this many worker threads, as tokio builds it. The future that `block_on` gets stays on
    /// the main thread, which is not a worker.
    MultiThread(usize),
}

impl Flavour {
    /// Parses `idle-polling`, `current-thread`, `multi-thread:WORKERS`, or `multi-thread` with as many
    /// workers as there are cores.
    ///
    /// # Errors
    ///
    /// Fails if `text` is none of these.
    pub fn parse(text: &str) -> Result<Self, ValueError> {
        match text.split_once(':') {
            None if text == "idle-polling" => Ok(Self::IdlePolling),
            None if text == "current-thread" => Ok(Self::CurrentThread),
            None if text == "multi-thread" => Ok(Self::multi_thread()),
            Some(("multi-thread", workers)) => match workers.parse() {
                Ok(workers @ 1..=MAX_WORKERS) => Ok(Self::MultiThread(workers)),
                _ => Err(ValueError::number("number of workers", workers, format!("1 to {MAX_WORKERS}"))),
            },
            _ => Err(ValueError::unknown("idle-polling, current-thread, multi-thread, multi-thread:WORKERS")),
        }
    }

    /// Returns the flavour of a multi-thread runtime with as many workers as this process has cores, as
    /// `#[tokio::main]` builds it.
    pub fn multi_thread() -> Self {
        Self::MultiThread(std::thread::available_parallelism().map_or(1, usize::from).min(MAX_WORKERS))
    }

    /// Returns whether the whole process runs on one thread.
    pub const fn is_one_thread(self) -> bool {
        match self {
            Self::IdlePolling | Self::CurrentThread => true,
            Self::MultiThread(_) => false,
        }
    }

    /// Builds the runtime.
    ///
    /// # Errors
    ///
    /// Fails if the system has no threads or descriptors left.
    pub fn build(self) -> io::Result<Runtime> {
        match self {
            Self::IdlePolling => idle_polling(&mut self.builder()).enable_all().build(),
            Self::CurrentThread | Self::MultiThread(_) => self.builder().enable_all().build(),
        }
    }

    /// Builds the runtime without polling when idle, for a load generator that yields until the next request
    /// is due. Such a runtime is never idle, and a separate task polls completions.
    ///
    /// # Errors
    ///
    /// Fails as [`build`](Self::build) does.
    pub fn build_never_idle(self) -> io::Result<Runtime> {
        self.builder().enable_all().build()
    }

    fn builder(self) -> Builder {
        match self {
            Self::IdlePolling | Self::CurrentThread => Builder::new_current_thread(),
            Self::MultiThread(workers) => {
                let mut builder = Builder::new_multi_thread();
                builder.worker_threads(workers);
                builder
            }
        }
    }
}

impl fmt::Display for Flavour {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::IdlePolling => formatter.pad("idle-polling"),
            Self::CurrentThread => formatter.pad("current-thread"),
            Self::MultiThread(workers) => formatter.pad(&format!("multi-thread:{workers}")),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;

    #[test]
    fn flavours_are_read_back() {
        for text in ["idle-polling", "current-thread", "multi-thread", "multi-thread:3"] {
            let flavour = Flavour::parse(text).unwrap();
            assert_eq!(Flavour::parse(&flavour.to_string()), Ok(flavour));
            flavour.build().unwrap();
            flavour.build_never_idle().unwrap();
        }
        assert_eq!(Flavour::parse("multi-thread:3"), Ok(Flavour::MultiThread(3)));
        assert_eq!(Flavour::parse("multi-thread"), Ok(Flavour::multi_thread()));
    }

    #[test]
    fn unknown_flavours_are_refused_with_the_accepted_ones() {
        for bad in ["", "threads", "current-thread:1", "idle-polling:1", "multi", "multi-threads:2"] {
            let accepted = "idle-polling, current-thread, multi-thread";
            assert!(Flavour::parse(bad).unwrap_err().to_string().contains(accepted), "{bad:?}");
        }
        for bad in
            ["multi-thread:", "multi-thread:0", "multi-thread:257", "multi-thread:x", "multi-thread:-1"]
        {
            assert!(Flavour::parse(bad).unwrap_err().to_string().contains("1 to 256"), "{bad:?}");
        }
    }
}
