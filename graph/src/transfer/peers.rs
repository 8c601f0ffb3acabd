//! What is known of the other parts: whether they run, have left, have failed, or are lost, and which steps
//! they run.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Waker;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::watch;

use crate::dataflow::KernelError;
use crate::error::{GraphError, Problem};
use crate::placement::{CrossingId, Part};
use crate::transfer::TransferMode;
use crate::transfer::state::SessionState;
use tonic_rdma_verbs::unstable::{lock, wake_all};

/// The state of the other parts, as this part knows it. All transfers of a session share it.
#[derive(Debug)]
pub(crate) struct Peers {
    /// Whether any part has left, failed or is lost. While none has, a check costs one load.
    trouble: AtomicBool,
    health: Mutex<Health>,
    /// Counts the changes.
    changes: watch::Sender<u64>,
    /// The wakers of all transfers.
    cells: Mutex<Vec<Arc<WakerCell>>>,
}

#[derive(Debug)]
struct Health {
    left: Vec<bool>,
    /// Parts of which a connection has ended without a known reason.
    doubted: Vec<bool>,
    /// The first part that failed or was lost.
    end: Option<(Part, PeerEnd)>,
}

/// How a part ended.
#[derive(Clone, Debug)]
pub(crate) enum PeerEnd {
    /// It has failed, and said why.
    Failed(String),
    /// It is gone without a word.
    Lost(String),
    /// It runs other steps than this part: the mode, the steps of this part, and those of the other one.
    OtherSteps(String, Range<u64>, Range<u64>),
}

impl Peers {
    pub(crate) fn new(parts: usize) -> Self {
        let health = Health { left: vec![false; parts], doubted: vec![false; parts], end: None };
        Self {
            trouble: AtomicBool::new(false),
            health: Mutex::new(health),
            changes: watch::Sender::new(0),
            cells: Mutex::default(),
        }
    }

    /// Notes that a part has left in good order.
    pub(crate) fn has_left(&self, part: Part) {
        if let Some(left) = lock(&self.health).left.get_mut(part.0) {
            *left = true;
        }
        self.changed();
    }

    /// Wakes all transfers, because a part has said something of itself.
    pub(crate) fn wake_transfers(&self) {
        let cells = lock(&self.cells).clone();
        cells.iter().for_each(|cell| cell.wake());
    }

    /// Notes that a part has not ended in good order.
    pub(crate) fn ended(&self, part: Part, end: PeerEnd) {
        lock(&self.health).end.get_or_insert((part, end));
        self.changed();
    }

    fn changed(&self) {
        self.trouble.store(true, Ordering::Release);
        self.changes.send_modify(|count| *count += 1);
        self.wake_transfers();
    }

    /// Returns an error if any part has failed or is lost, or if `needed` has left.
    pub(crate) fn check(&self, needed: Part) -> Result<(), GraphError> {
        if !self.trouble.load(Ordering::Acquire) {
            return Ok(());
        }
        self.check_all()?;
        if self.left(needed) {
            return Err(Problem::PeerLost { peer: needed.0, source: "it has left the session".into() }.into());
        }
        Ok(())
    }

    /// Returns an error if any part has failed or is lost.
    pub(crate) fn check_all(&self) -> Result<(), GraphError> {
        match &lock(&self.health).end {
            None => Ok(()),
            Some((part, PeerEnd::Failed(reason))) => {
                Err(Problem::PeerFailed { peer: part.0, reason: reason.clone() }.into())
            }
            Some((part, PeerEnd::Lost(reason))) => {
                Err(Problem::PeerLost { peer: part.0, source: reason.clone().into() }.into())
            }
            Some((part, PeerEnd::OtherSteps(mode, ours, theirs))) => {
                let (mode, ours, theirs) = (mode.clone(), ours.clone(), theirs.clone());
                Err(Problem::OtherSteps { peer: part.0, mode, ours, theirs }.into())
            }
        }
    }

    /// Returns whether a part has left in good order.
    pub(crate) fn left(&self, part: Part) -> bool {
        lock(&self.health).left.get(part.0).is_some_and(|left| *left)
    }

    /// Notes that a connection to a part has ended without a known reason. Returns whether this is the first
    /// one of that part.
    fn doubt(&self, part: Part) -> bool {
        let mut health = lock(&self.health);
        let Some(doubted) = health.doubted.get_mut(part.0) else { return false };
        !std::mem::replace(doubted, true)
    }

    /// Returns a receiver that sees each later change.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Makes a cell for a waker, which is also woken by each change.
    pub(crate) fn cell(&self) -> Arc<WakerCell> {
        let cell = Arc::new(WakerCell::default());
        let mut cells = lock(&self.cells);
        cells.retain(|cell| Arc::strong_count(cell) > 1);
        cells.push(Arc::clone(&cell));
        cell
    }
}

/// A cell for one waker.
#[derive(Debug, Default)]
pub(crate) struct WakerCell(Mutex<Option<Waker>>);

impl WakerCell {
    /// Keeps a clone of `waker` in place of the last one.
    pub(crate) fn set(&self, waker: &Waker) {
        let mut kept = lock(&self.0);
        if !kept.as_ref().is_some_and(|kept| kept.will_wake(waker)) {
            *kept = Some(waker.clone());
        }
    }

    /// Wakes and forgets the waker.
    pub(crate) fn wake(&self) {
        let waker = lock(&self.0).take();
        wake_all(waker);
    }
}

/// How long the reason for the end of a connection may take.
const REASON_LIMIT: Duration = Duration::from_secs(2);

/// What transfers need of their session.
#[derive(Clone)]
pub(crate) struct SessionHandle {
    pub(crate) peers: Arc<Peers>,
    /// The threads of the session.
    pub(crate) runtime: Handle,
    pub(crate) state: Arc<SessionState>,
    /// Keeps the connections.
    pub(crate) _core: Arc<dyn Send + Sync>,
}

impl SessionHandle {
    /// Makes the error of a crossing tensor that this part does not send or receive.
    pub(crate) fn unknown(&self, crossing: CrossingId, step: u64) -> GraphError {
        let reason =
            format!("crossing tensor {} (step {step}) is none of this part in this direction", crossing.0);
        GraphError::of_setting("crossing", reason)
    }

    /// Notes that a connection to a part has ended. The reason comes by the watch over that part, a moment
    /// earlier or later: the part has failed, has left, or was killed. If no reason comes, the part counts as
    /// lost after a while.
    ///
    /// # Errors
    /// The reason is here.
    pub(crate) fn connection_ended(&self, peer: Part, source: &KernelError) -> Result<(), GraphError> {
        self.peers.check(peer)?;
        if self.peers.doubt(peer) {
            let peers = Arc::clone(&self.peers);
            let seconds = REASON_LIMIT.as_secs();
            let reason = format!(
                "a connection for tensors has ended ({source}), and in {seconds} s the part has not said why"
            );
            self.runtime.spawn(async move {
                tokio::time::sleep(REASON_LIMIT).await;
                if !peers.left(peer) {
                    peers.ended(peer, PeerEnd::Lost(reason));
                }
            });
        }
        Ok(())
    }
}

/// The agreement of the parts on the steps of the run under way, as one part knows it. For transfers whose
/// tensors don't carry the number of their step.
#[derive(Debug)]
pub(crate) struct Agreement {
    mode: TransferMode,
    /// The parts that send to this one.
    senders: Vec<Part>,
    /// The number of the run.
    number: Option<u64>,
    /// Woken when another part says something.
    heard: Arc<WakerCell>,
}

impl Agreement {
    pub(crate) fn new(
        session: &SessionHandle,
        mode: TransferMode,
        senders: impl Iterator<Item = Part>,
    ) -> Self {
        let mut senders: Vec<Part> = senders.collect();
        senders.sort_unstable();
        senders.dedup();
        Self { mode, senders, number: None, heard: session.peers.cell() }
    }

    /// Tells the other parts which steps this part runs now.
    pub(crate) fn begin(&mut self, session: &SessionHandle, steps: &Range<u64>) {
        self.number = session.state.begin(self.mode, steps);
    }

    /// Returns whether all senders run the same steps. Wakes `waker` when that may be known.
    pub(crate) fn is_reached(&self, session: &SessionHandle, waker: &Waker) -> Result<bool, GraphError> {
        // Set before the check, so that no later message is missed.
        self.heard.set(waker);
        // Asked before the check of the peers: `has_begun` notes a part whose steps differ, and the check
        // finds it.
        let all = self.unheard(session).is_none();
        session.peers.check_all()?;
        Ok(all)
    }

    /// Returns a sender that has not said which steps it runs.
    pub(crate) fn unheard(&self, session: &SessionHandle) -> Option<Part> {
        let number = self.number?;
        let has_heard =
            |peer: Part| session.state.has_begun(peer, self.mode, number) || session.peers.left(peer);
        self.senders.iter().copied().find(|peer| !has_heard(*peer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_end_is_the_one_that_is_reported() {
        let peers = Peers::new(3);
        peers.check(Part(1)).unwrap();
        peers.has_left(Part(2));
        peers.check(Part(1)).unwrap();
        let error = peers.check(Part(2)).unwrap_err();
        assert!(matches!(error.problem(), Problem::PeerLost { peer: 2, .. }), "{error}");
        peers.ended(Part(1), PeerEnd::Failed("out of ideas".to_owned()));
        peers.ended(Part(0), PeerEnd::Lost("reset".to_owned()));
        for needed in 0..3 {
            let error = peers.check(Part(needed)).unwrap_err();
            assert_eq!(error.to_string(), "part 1 has failed: out of ideas");
        }
    }
}
