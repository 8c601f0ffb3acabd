//! What is known of the other parts: whether they are well, have left, have failed, or are lost.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Waker;

use tokio::sync::watch;

use crate::error::GraphError;
use crate::placement::Part;
use tonic_rdma_verbs::internal::{lock, wake_all};

/// The state of the other parts, as this part knows it. All transfers of a session share it.
#[derive(Debug)]
pub(crate) struct Peers {
    /// Whether any part is not well, so that a look costs one load while all are.
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
    end: Option<(Part, End)>,
}

/// How a part ended.
#[derive(Clone, Debug)]
enum End {
    Failed(String),
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

    /// Notes that a part has failed, and said why.
    pub(crate) fn has_failed(&self, part: Part, reason: String) {
        self.ended(part, End::Failed(reason));
    }

    /// Notes that a part is gone without a word.
    pub(crate) fn is_lost(&self, part: Part, reason: String) {
        self.ended(part, End::Lost(reason));
    }

    /// Notes that a part runs other steps in a mode than this one.
    pub(crate) fn runs_other_steps(&self, part: Part, mode: String, ours: Range<u64>, theirs: Range<u64>) {
        self.ended(part, End::OtherSteps(mode, ours, theirs));
    }

    /// Wakes all transfers, because a part has said something of itself.
    pub(crate) fn said_something(&self) {
        let cells = lock(&self.cells).clone();
        cells.iter().for_each(|cell| cell.wake());
    }

    fn ended(&self, part: Part, end: End) {
        lock(&self.health).end.get_or_insert((part, end));
        self.changed();
    }

    fn changed(&self) {
        self.trouble.store(true, Ordering::Release);
        self.changes.send_modify(|count| *count += 1);
        self.said_something();
    }

    /// Returns an error if any part has failed or is lost, or if `needed` has left.
    pub(crate) fn check(&self, needed: Part) -> Result<(), GraphError> {
        if !self.trouble.load(Ordering::Acquire) {
            return Ok(());
        }
        self.check_all()?;
        if self.left(needed) {
            return Err(GraphError::PeerLost { peer: needed.0, source: "it has left the session".into() });
        }
        Ok(())
    }

    /// Returns an error if any part has failed or is lost.
    pub(crate) fn check_all(&self) -> Result<(), GraphError> {
        match &lock(&self.health).end {
            None => Ok(()),
            Some((part, End::Failed(reason))) => {
                Err(GraphError::PeerFailed { peer: part.0, reason: reason.clone() })
            }
            Some((part, End::Lost(reason))) => {
                Err(GraphError::PeerLost { peer: part.0, source: reason.clone().into() })
            }
            Some((part, End::OtherSteps(mode, ours, theirs))) => {
                let (mode, ours, theirs) = (mode.clone(), ours.clone(), theirs.clone());
                Err(GraphError::OtherSteps { peer: part.0, mode, ours, theirs })
            }
        }
    }

    /// Returns whether a part has left in good order.
    pub(crate) fn left(&self, part: Part) -> bool {
        lock(&self.health).left.get(part.0).is_some_and(|left| *left)
    }

    /// Notes that a connection to a part has ended without a known reason. Returns whether this is the first one of that part.
    pub(crate) fn doubt(&self, part: Part) -> bool {
        let mut health = lock(&self.health);
        let Some(doubted) = health.doubted.get_mut(part.0) else { return false };
        !std::mem::replace(doubted, true)
    }

    /// Returns a receiver that sees each later change.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Makes a place for a waker, which is also woken by each change.
    pub(crate) fn cell(&self) -> Arc<WakerCell> {
        let cell = Arc::new(WakerCell::default());
        let mut cells = lock(&self.cells);
        cells.retain(|cell| Arc::strong_count(cell) > 1);
        cells.push(Arc::clone(&cell));
        cell
    }
}

/// A place for one waker.
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
        assert!(matches!(error, GraphError::PeerLost { peer: 2, .. }), "{error}");
        peers.has_failed(Part(1), "out of ideas".to_owned());
        peers.is_lost(Part(0), "reset".to_owned());
        for needed in 0..3 {
            let error = peers.check(Part(needed)).unwrap_err();
            assert_eq!(error.to_string(), "part 1 has failed: out of ideas");
        }
    }
}
