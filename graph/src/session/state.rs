//! What the service of a part knows of its session.

use std::collections::HashMap;
use std::sync::Arc;

use tonic_rdma_tensor::internal::meeting::Meeting;
use tonic_rdma_tensor::{Dtype, Shape, TensorSpec};

use crate::placement::{Crossing, Part};
use crate::transfer::proto::{Details, PutRequest};
use crate::transfer::{Mailbox, Mode, Parcel, Peers};

/// The mailboxes of a part, by the mode and the number of the crossing tensor.
pub(super) type Mailboxes = HashMap<(Mode, usize), (Crossing, Arc<Mailbox>)>;

/// A part that connects, or is connected.
#[derive(Debug)]
pub(super) struct State {
    pub(super) me: Part,
    pub(super) parts: usize,
    pub(super) modes: Vec<Mode>,
    pub(super) window: usize,
    pub(super) meeting: Arc<Meeting<Details>>,
    pub(super) mailboxes: Mailboxes,
    pub(super) peers: Arc<Peers>,
}

impl State {
    /// Checks a tensor that came by a call of `caller`.
    pub(super) fn check(&self, caller: Part, request: PutRequest) -> Result<(Arc<Mailbox>, Parcel), String> {
        let me = self.me;
        let mode = Mode::of_number(request.mode).filter(|mode| self.modes.contains(mode));
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
}
