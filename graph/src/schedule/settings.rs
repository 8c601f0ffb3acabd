//! How an executor runs.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Waker;
use std::time::Duration;

use serde::de::IntoDeserializer as _;
use serde::{Deserialize, Serialize};
use tonic_rdma_verbs::internal::lock;

/// What becomes of a receive that has not arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReceiveMode {
    /// It goes to the tail of the ready queue (§4).
    #[default]
    PollingAsync,
    /// The thread waits for it when it gets to a node that needs it. Nodes run in topological order, so that parts that wait for one
    /// another always go on.
    Blocking,
    /// Its arrival puts it into the ready queue.
    Callback,
}

impl ReceiveMode {
    /// All modes.
    pub const ALL: [Self; 3] = [Self::PollingAsync, Self::Blocking, Self::Callback];
}

impl fmt::Display for ReceiveMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

impl FromStr for ReceiveMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::deserialize(text.into_deserializer()).map_err(|_: serde::de::value::Error| {
            format!("{text:?} is no receive mode; use polling-async, blocking or callback")
        })
    }
}

/// What the nodes of a run do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Work {
    /// They compute.
    #[default]
    Compute,
    /// They compute, and the executor keeps the values that this part sends in the last step of the run, for [`Replay`](Self::Replay).
    ComputeAndKeep,
    /// They don't compute: the values that were kept are sent again, so that only the transfers and the scheduling take time. No
    /// inputs are fed, and no results come out.
    Replay,
}

/// How an executor runs.
///
/// ```
/// use tonic_rdma_graph::schedule::{ReceiveMode, Settings};
///
/// let mut settings = Settings::default();
/// settings.receive = ReceiveMode::Callback;
/// settings.window = 4;
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Settings {
    /// What becomes of a receive that has not arrived.
    pub receive: ReceiveMode,
    /// The largest number of steps in flight. The default, 1, ends each step before the next one begins.
    pub window: usize,
    /// The longest time without any progress of this part: no node runs, nothing arrives, and no send begins. The default is 60 s.
    pub deadline: Duration,
    /// How long an executor that has nothing to do looks for arrivals before its thread sleeps. It gives its
    /// core to other threads between looks. `None`, the default, leaves this to the transfers
    /// ([`Transfers::spin`](crate::schedule::Transfers::spin)).
    pub spin: Option<Duration>,
}

impl Default for Settings {
    fn default() -> Self {
        Self { receive: ReceiveMode::default(), window: 1, deadline: Duration::from_secs(60), spin: None }
    }
}

/// Stops a run from another thread. Clones stop the same run.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    state: Arc<StopState>,
}

#[derive(Debug, Default)]
struct StopState {
    stopped: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl Stop {
    /// Stops the run, which returns [`GraphError::Stopped`](crate::GraphError::Stopped) once the kernel that runs now has ended. Later
    /// runs return it at once.
    pub fn stop(&self) {
        self.state.stopped.store(true, Ordering::SeqCst);
        let waker = lock(&self.state.waker).take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Returns whether the run was stopped.
    pub fn is_stopped(&self) -> bool {
        self.state.stopped.load(Ordering::SeqCst)
    }

    /// Keeps the waker of the thread that runs.
    pub(super) fn watched_by(&self, waker: &Waker) {
        *lock(&self.state.waker) = Some(waker.clone());
    }
}
