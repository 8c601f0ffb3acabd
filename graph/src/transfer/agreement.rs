//! The agreement of the parts on the steps of a run, for transfers whose tensors don't carry the number of their step.

use std::ops::Range;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::error::GraphError;
use crate::placement::Part;
use crate::transfer::Mode;
use crate::transfer::base::Base;
use crate::transfer::peers::WakerCell;

/// The runs of all parts of a session.
pub(crate) trait RunsOfParts: Send + Sync {
    /// Tells the other parts which steps this part runs now in a mode. Returns the number of the run in this mode, or `None` if it has no
    /// step.
    fn begin(&self, mode: Mode, steps: &Range<u64>) -> Option<u64>;

    /// Returns whether another part has said which steps its run with this number has. If they are other steps than here, the part is
    /// known to be in trouble.
    fn has_begun(&self, peer: Part, mode: Mode, number: u64) -> bool;

    /// Tells the other parts that this part has failed.
    fn abort(&self, reason: &str);
}

/// What one part knows of the run under way.
#[derive(Debug)]
pub(crate) struct Agreement {
    mode: Mode,
    /// The parts that send to this one.
    senders: Vec<Part>,
    /// The number of the run.
    number: Option<u64>,
    /// Woken when another part says something.
    heard: Arc<WakerCell>,
}

impl Agreement {
    pub(crate) fn new(base: &Base, mode: Mode, senders: impl Iterator<Item = Part>) -> Self {
        let mut senders: Vec<Part> = senders.collect();
        senders.sort_unstable();
        senders.dedup();
        Self { mode, senders, number: None, heard: base.peers.cell() }
    }

    /// Tells the other parts which steps this part runs now.
    pub(crate) fn begin(&mut self, base: &Base, steps: &Range<u64>) {
        self.number = base.runs.begin(self.mode, steps);
    }

    /// Returns whether all senders run the same steps. Wakes the waker of `context` when that may be known.
    pub(crate) fn poll(&self, base: &Base, context: &mut Context<'_>) -> Poll<Result<(), GraphError>> {
        let Some(number) = self.number else { return Poll::Ready(Ok(())) };
        // Before the look, so that nothing that is said later is missed.
        self.heard.set(context.waker());
        // Before the look at the steps: a part whose steps differ is in trouble before it counts as heard.
        let all = self.senders.iter().all(|peer| self.has_heard(base, *peer, number));
        base.peers.check_all()?;
        if all { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    /// Returns a sender that has not said which steps it runs.
    pub(crate) fn unheard(&self, base: &Base) -> Option<Part> {
        let number = self.number?;
        self.senders.iter().copied().find(|peer| !self.has_heard(base, *peer, number))
    }

    fn has_heard(&self, base: &Base, peer: Part, number: u64) -> bool {
        base.runs.has_begun(peer, self.mode, number) || base.peers.left(peer)
    }
}
