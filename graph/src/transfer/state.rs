//! What a part knows of its session: its mailboxes and runs, and the service by which it gets tensors.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use tonic::{Request, Response, Status};

use crate::placement::{Crossing, Part};
use crate::transfer::TransferMode;
use crate::transfer::calls::{LONGEST_CALL, Mailbox, Parcel, refusal};
use crate::transfer::peers::{PeerEnd, Peers};
use crate::transfer::proto::parts_server::Parts;
use crate::transfer::proto::{Details, PutReply, PutRequest, Run};
use tonic_rdma_tensor::unstable::bootstrap::Bootstrap;
use tonic_rdma_tensor::{Dtype, Shape, TensorSpec};

/// The mailboxes of a part, by the mode and the number of the crossing tensor.
pub(crate) type Mailboxes = HashMap<(TransferMode, usize), (Crossing, Arc<Mailbox>)>;

/// A part that connects, or is connected.
#[derive(Debug)]
pub(crate) struct SessionState {
    pub(crate) me: Part,
    pub(crate) parts: usize,
    pub(crate) modes: Vec<TransferMode>,
    pub(crate) window: usize,
    pub(crate) bootstrap: Arc<Bootstrap<Details>>,
    pub(crate) mailboxes: Mailboxes,
    pub(crate) peers: Arc<Peers>,
}

impl SessionState {
    /// Checks a tensor that came by a call of `caller`.
    pub(crate) fn check(&self, caller: Part, request: PutRequest) -> Result<(Arc<Mailbox>, Parcel), String> {
        let me = self.me;
        let mode = TransferMode::of_number(request.mode).filter(|mode| self.modes.contains(mode));
        let mode = mode.ok_or_else(|| format!("mode {} is not one of this session", request.mode))?;
        if mode.uses_slots() {
            return Err(format!("no call brings a tensor in mode {mode}"));
        }
        let number = usize::try_from(request.crossing).ok();
        let found = number.and_then(|number| self.mailboxes.get(&(mode, number)));
        let found = found.filter(|(crossing, _)| crossing.from == caller);
        let (crossing, mailbox) = found.ok_or_else(|| {
            format!("no crossing tensor {} goes from part {caller} to part {me}", request.crossing)
        })?;
        let named = |reason: String| format!("crossing tensor {:?}: {reason}", crossing.name);
        let dtype: Dtype = request.dtype.parse().map_err(|_| named("its type is unknown".to_owned()))?;
        let shape = Shape::new(&request.dims).map_err(|error| named(error.to_string()))?;
        let spec = TensorSpec::new(dtype, shape).map_err(|error| named(error.to_string()))?;
        crossing.placement.check(&spec).map_err(|error| named(error.to_string()))?;
        let bytes = spec.bytes().ok_or_else(|| named(format!("{spec} has no fixed length")))?;
        if bytes != request.content.len() as u64 {
            return Err(named(format!("{spec} has {bytes} bytes, not {}", request.content.len())));
        }
        let parcel = Parcel { step: request.step, spec, content: request.content };
        Ok((Arc::clone(mailbox), parcel))
    }

    /// Compares the runs of another part with those of this one. Notes the first run whose steps differ.
    pub(crate) fn compare_runs(&self, peer: Part) {
        let found = {
            let ours = self.bootstrap.standing.borrow();
            self.bootstrap.of(peer.0, |other| difference(&ours.details.runs, &other.details.runs)).flatten()
        };
        if let Some((ours, theirs)) = found {
            let mode = TransferMode::of_number(ours.mode).map(|mode| mode.to_string()).unwrap_or_default();
            let end = PeerEnd::OtherSteps(mode, ours.first..ours.end, theirs.first..theirs.end);
            self.peers.ended(peer, end);
        }
    }

    /// Tells the other parts which steps this part runs now in a mode. Returns the number of the run in this
    /// mode, or `None` if it has no step.
    ///
    /// A slot has no room for the number of a step: its n-th tensor is the sender's n-th tensor. So all parts
    /// have to run the same steps. Each part tells the others the steps of each of its runs, and both parts
    /// compare. A part that takes tensors out of slots does not end a run well before it knows that the
    /// senders run the same steps.
    pub(crate) fn begin(&self, mode: TransferMode, steps: &Range<u64>) -> Option<u64> {
        if steps.is_empty() {
            return None;
        }
        let mut number = 0;
        self.bootstrap.standing.send_modify(|standing| {
            let runs = &mut standing.details.runs;
            let of_mode = |run: &&Run| run.mode == mode.number();
            number = runs.iter().rfind(of_mode).map_or(0, |run| run.number + 1);
            runs.push(Run { mode: mode.number(), number, first: steps.start, end: steps.end });
            // A receiver may be as many runs behind as a slot has buffers, and one more that waits.
            if runs.iter().filter(of_mode).count() > self.window + 2
                && let Some(oldest) = runs.iter().position(|run| run.mode == mode.number())
            {
                runs.remove(oldest);
            }
        });
        for peer in (0..self.parts).map(Part).filter(|peer| *peer != self.me) {
            self.compare_runs(peer);
        }
        Some(number)
    }

    /// Returns whether another part has said which steps its run with this number has. If they are other
    /// steps than here, the part is known to be in trouble.
    pub(crate) fn has_begun(&self, peer: Part, mode: TransferMode, number: u64) -> bool {
        // First, so that a part that runs other steps never counts.
        self.compare_runs(peer);
        let begun = |run: &Run| run.mode == mode.number() && run.number >= number;
        self.bootstrap.of(peer.0, |other| other.details.runs.iter().any(begun)).unwrap_or_default()
    }
}

/// Returns the first run of both parts whose steps differ.
fn difference(ours: &[Run], theirs: &[Run]) -> Option<(Run, Run)> {
    ours.iter().find_map(|ours| {
        let same = |theirs: &&Run| (theirs.mode, theirs.number) == (ours.mode, ours.number);
        let theirs = theirs.iter().find(same)?;
        (theirs != ours).then_some((*ours, *theirs))
    })
}

/// The service. It is empty until the part connects.
#[derive(Clone, Debug, Default)]
pub(crate) struct Service(pub(crate) Arc<OnceLock<Arc<SessionState>>>);

/// Puts a tensor of a part into its mailbox, once there is room.
async fn take(state: &SessionState, caller: Part, request: PutRequest) -> Result<(), Status> {
    let sequence = request.sequence;
    let (mailbox, parcel) = state.check(caller, request).map_err(Status::invalid_argument)?;
    match tokio::time::timeout(LONGEST_CALL, mailbox.put(sequence, parcel)).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(reason)) => Err(Status::failed_precondition(reason)),
        Err(_) => Err(Status::deadline_exceeded("the receiver took no earlier tensor in time")),
    }
}

#[tonic::async_trait]
impl Parts for Service {
    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutReply>, Status> {
        let request = request.into_inner();
        let state = self.0.get().ok_or_else(|| Status::unavailable("this part does not connect yet"))?;
        // A caller of another session takes this process for one that listened here before, and that has
        // ended. So this error is not marked as a refusal of the tensor.
        let caller = state.bootstrap.caller(request.part, &request.key)?;
        let taken = take(state, Part(caller), request).await;
        taken.map(|()| Response::new(PutReply {})).map_err(refusal)
    }
}

#[cfg(test)]
mod runs_tests {
    use super::*;

    #[test]
    fn the_first_run_with_other_steps_is_found() {
        let run = |mode, number, first, end| Run { mode, number, first, end };
        let ours = [run(5, 0, 0, 1), run(4, 0, 1, 3), run(5, 1, 3, 9)];
        assert_eq!(difference(&ours, &ours), None);
        assert_eq!(difference(&ours, &[]), None);
        assert_eq!(difference(&ours, &[run(5, 0, 0, 1), run(5, 1, 3, 9), run(5, 2, 9, 10)]), None);
        let theirs = [run(4, 0, 1, 3), run(5, 1, 4, 9)];
        assert_eq!(difference(&ours, &theirs), Some((ours[2], theirs[1])));
    }
}
