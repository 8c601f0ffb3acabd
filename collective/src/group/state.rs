//! What a rank knows of its group: where it is, and the first failure. The service, the watch and the
//! communicator share it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::Waker;

use crate::error::{CollectiveError, OperationStep};
use crate::group::agreement::{Move, Proposal, Standing};
use crate::group::proto::{Loss, Report, Reports};
use tonic_rdma::unstable::{lock, wake_all};
use tonic_rdma_tensor::unstable::bootstrap::{BootstrapCell, Key, shortened};

/// The number of reports that a rank keeps for those who watch it: those of its latest generations.
pub(crate) const REPORTS: usize = 4;

/// The name of a group: the key of its bootstrap, which all ranks share.
pub(crate) type GroupId = Key;

/// The state of one rank's session. Ranks have the numbers of the bootstrap.
#[derive(Debug)]
pub(crate) struct SessionState {
    pub(crate) me: usize,
    pub(crate) size: usize,
    /// The bootstrap, once this rank has come to it.
    pub(crate) cell: BootstrapCell<Reports>,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    standing: Standing,
    epoch: Option<Arc<Epoch>>,
    lost: BTreeMap<usize, Arc<str>>,
    /// The reason why this rank has left the group.
    left: Option<Arc<str>>,
}

/// One generation of the group.
#[derive(Debug)]
pub(crate) struct Epoch {
    pub(crate) generation: u64,
    /// The members, by their ranks of the bootstrap. The index is the rank in this generation.
    pub(crate) members: Vec<usize>,
    /// This rank's index.
    pub(crate) rank: usize,
    pub(crate) failure: Failure,
    pub(crate) position: Position,
}

impl Epoch {
    fn new(generation: u64, members: Vec<usize>, me: usize) -> Self {
        let rank = members.iter().position(|rank| *rank == me).unwrap_or_default();
        Self { generation, members, rank, failure: Failure::default(), position: Position::default() }
    }

    /// Returns the rank in this generation of a rank of the bootstrap.
    pub(crate) fn index(&self, rank: usize) -> Option<usize> {
        self.members.binary_search(&rank).ok()
    }

    fn lose(&self, rank: usize, reason: &Arc<str>) {
        if let Some(rank) = self.index(rank) {
            self.failure.set(CollectiveError::rank_lost(rank, self.position.step(), Arc::clone(reason)));
        }
    }
}

impl SessionState {
    pub(crate) fn new(me: usize, size: usize) -> Self {
        Self { me, size, cell: BootstrapCell::default(), inner: Mutex::default() }
    }

    /// Returns the name of the group, if it has one yet.
    pub(crate) fn group(&self) -> Option<GroupId> {
        self.cell.get()?.key(self.me)
    }

    /// Begins the first generation: all ranks of the bootstrap.
    pub(crate) fn begin(&self) -> Arc<Epoch> {
        lock(&self.inner).adopt(1, (0..self.size).collect(), self.me)
    }

    /// Notes that a rank is lost.
    pub(crate) fn lose(&self, rank: usize, reason: Arc<str>) {
        let mut inner = lock(&self.inner);
        inner.standing.suspect(rank, reason.to_string());
        if let Some(epoch) = &inner.epoch {
            epoch.lose(rank, &reason);
        }
        inner.lost.entry(rank).or_insert(reason);
    }

    /// Suspects a rank during an agreement.
    pub(crate) fn suspect(&self, rank: usize, reason: &str) {
        lock(&self.inner).standing.suspect(rank, reason);
    }

    /// Leaves the group forever, because the others continue without this rank.
    pub(crate) fn leave(&self, reason: &Arc<str>) {
        lock(&self.inner).left.get_or_insert_with(|| Arc::clone(reason));
    }

    /// Returns the reason why this rank has left.
    pub(crate) fn left_reason(&self) -> Option<Arc<str>> {
        lock(&self.inner).left.clone()
    }

    /// Accepts what another rank reports. A member that reports a failure of a later generation has left this
    /// one behind, and its report of this one may be gone.
    pub(crate) fn receive_report(&self, rank: usize) {
        let Some(epoch) = lock(&self.inner).epoch.clone() else { return };
        let first_of = |reports: &[Report]| {
            let latest = &reports[reports.len().saturating_sub(REPORTS)..];
            latest.iter().find(|report| report.generation >= epoch.generation).cloned()
        };
        let report = self
            .cell
            .get()
            .and_then(|bootstrap| bootstrap.of(rank, |other| first_of(&other.details.reports)));
        let (Some(report), Some(rank)) = (report.flatten(), epoch.index(rank)) else { return };
        match report.loss {
            // All survivors get the same error, also those that get the report before they notice the loss.
            Some(Loss { rank: lost, reason })
                if epoch.index(lost as usize).is_some_and(|lost| lost != epoch.rank) =>
            {
                let reason = format!("{}, as rank {rank} noticed", shortened(&reason));
                epoch.lose(lost as usize, &reason.into());
            }
            _ => {
                epoch.failure.set(CollectiveError::reported(rank, &shortened(&report.message)));
            }
        }
    }

    /// Returns what this rank knows, and where it is.
    pub(crate) fn standing(&self) -> (Standing, Option<Arc<Epoch>>) {
        let inner = lock(&self.inner);
        (inner.standing.clone(), inner.epoch.clone())
    }

    /// Notes whether this rank waits for an agreement. If it is in a later generation already, returns that
    /// one.
    pub(crate) fn agree(&self, generation: u64, agreeing: bool) -> Option<Arc<Epoch>> {
        let mut inner = lock(&self.inner);
        if inner.standing.generation > generation {
            return inner.epoch.clone();
        }
        inner.standing.agreeing = agreeing;
        None
    }

    /// Returns what this rank does next in an agreement.
    pub(crate) fn next(&self, answers: &BTreeMap<usize, Standing>) -> Move {
        lock(&self.inner).standing.next(self.me, answers)
    }

    /// Promises this rank's part in a group.
    ///
    /// # Errors
    /// The reason why not.
    pub(crate) fn promise(&self, proposal: &Proposal) -> Result<(), String> {
        if proposal.members.iter().any(|rank| *rank >= self.size) {
            let (members, size) = (&proposal.members, self.size);
            return Err(format!("{members:?} names a rank that is not one of {size}"));
        }
        lock(&self.inner).standing.promise(self.me, proposal)
    }

    /// Joins a generation that was agreed upon. Returns `None` if this rank is in it or in a later one, or
    /// has promised a later one since.
    pub(crate) fn adopt(&self, generation: u64, members: Vec<usize>) -> Option<Arc<Epoch>> {
        let epoch = {
            let mut inner = lock(&self.inner);
            if generation <= inner.standing.generation || generation < inner.standing.promised {
                return None;
            }
            inner.adopt(generation, members, self.me)
        };
        // Another member may have joined it earlier, and have reported its failure already.
        (0..self.size).for_each(|rank| self.receive_report(rank));
        Some(epoch)
    }
}

impl Inner {
    fn adopt(&mut self, generation: u64, members: Vec<usize>, me: usize) -> Arc<Epoch> {
        let epoch = Arc::new(Epoch::new(generation, members.clone(), me));
        self.standing.adopt(generation, members);
        for (rank, reason) in &self.lost {
            epoch.lose(*rank, reason);
        }
        self.epoch = Some(Arc::clone(&epoch));
        epoch
    }
}

/// The operation and the step of this rank, and the rank that it waits for. The engine writes them, and calls
/// of other ranks read them. The numbers are only for error messages, so a reader may see a mixture of two
/// neighbouring steps.
#[derive(Debug, Default)]
pub(crate) struct Position {
    operation: AtomicU64,
    step: AtomicU32,
    steps: AtomicU32,
    /// The rank that this one waits for, and one more; 0 if it waits for none.
    waits_for: AtomicU32,
}

impl Position {
    /// Says where this rank is, and which rank of its group it waits for.
    pub(crate) fn set(&self, at: OperationStep, waits_for: Option<usize>) {
        self.operation.store(at.operation, Ordering::Relaxed);
        self.step.store(at.step, Ordering::Relaxed);
        self.steps.store(at.steps, Ordering::Relaxed);
        self.waits_for.store(waits_for.map_or(0, |rank| rank as u32 + 1), Ordering::Relaxed);
    }

    /// Returns the operation and step.
    pub(crate) fn step(&self) -> OperationStep {
        OperationStep {
            operation: self.operation.load(Ordering::Relaxed),
            step: self.step.load(Ordering::Relaxed),
            steps: self.steps.load(Ordering::Relaxed),
        }
    }

    /// Returns the rank of the group that this rank waits for.
    pub(crate) fn waits_for(&self) -> Option<usize> {
        self.waits_for.load(Ordering::Relaxed).checked_sub(1).map(|rank| rank as usize)
    }
}

/// The first failure of one generation of a group. Threads that carry out operations poll it, which is one
/// load.
#[derive(Debug, Default)]
pub(crate) struct Failure {
    reason: OnceLock<CollectiveError>,
    wakers: Mutex<Vec<Waker>>,
}

impl Failure {
    /// Returns the first failure.
    pub(crate) fn reason(&self) -> Option<&CollectiveError> {
        self.reason.get()
    }

    /// Sets the failure, if there was none, and wakes all waiters. Returns whether this was the first.
    pub(crate) fn set(&self, reason: CollectiveError) -> bool {
        if self.reason.set(reason).is_err() {
            return false;
        }
        let wakers = std::mem::take(&mut *lock(&self.wakers));
        wake_all(wakers);
        true
    }

    /// Wakes `waker` when the group fails, or at once if it has failed.
    pub(crate) fn wake(&self, waker: &Waker) {
        let mut wakers = lock(&self.wakers);
        if self.reason().is_some() {
            drop(wakers);
            waker.wake_by_ref();
        } else if !wakers.iter().any(|known| known.will_wake(waker)) {
            wakers.push(waker.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Failure;
    use crate::error::{CollectiveError, setup};
    use std::future::poll_fn;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Poll, Wake, Waker};

    impl Failure {
        /// Waits until the group fails, and returns the failure.
        pub(crate) async fn wait(&self) -> &CollectiveError {
            poll_fn(|context| {
                self.wake(context.waker());
                self.reason().map_or(Poll::Pending, Poll::Ready)
            })
            .await
        }
    }

    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[tokio::test]
    async fn the_first_failure_stays_and_wakes_all_waiters() {
        let failure = Arc::new(Failure::default());
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(Arc::clone(&count));
        failure.wake(&waker);
        failure.wake(&waker);
        let waiting = Arc::clone(&failure);
        let waiter = tokio::spawn(async move { waiting.wait().await.to_string() });
        tokio::task::yield_now().await;
        assert!(failure.reason().is_none());
        assert!(failure.set(setup("first")));
        assert!(!failure.set(setup("second")));
        assert_eq!(waiter.await.unwrap(), "first");
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        failure.wake(&waker);
        assert_eq!(count.0.load(Ordering::Relaxed), 2);
    }
}
