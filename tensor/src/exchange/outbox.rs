//! A queue of actions that one thread at a time carries out.

use std::collections::VecDeque;
use std::sync::Mutex;

use tonic_rdma_verbs::internal::lock;

/// Actions that wait to be carried out, in order.
pub(crate) struct Outbox<A> {
    state: Mutex<ActionQueue<A>>,
}

struct ActionQueue<A> {
    actions: VecDeque<A>,
    busy: bool,
}

impl<A> Outbox<A> {
    pub(crate) fn new() -> Self {
        Self { state: Mutex::new(ActionQueue { actions: VecDeque::new(), busy: false }) }
    }

    /// Adds actions. The caller holds the lock of the state machine that made them, so that their order is right.
    pub(crate) fn add(&self, actions: impl IntoIterator<Item = A>) {
        lock(&self.state).actions.extend(actions);
    }

    /// Carries out all actions, and the actions that these add. If another thread does so already, this call returns at once,
    /// and the other thread carries these actions out.
    pub(crate) fn run(&self, mut carry_out: impl FnMut(A)) {
        {
            let mut state = lock(&self.state);
            if std::mem::replace(&mut state.busy, true) {
                return;
            }
        }
        loop {
            let mut state = lock(&self.state);
            let Some(action) = state.actions.pop_front() else {
                state.busy = false;
                return;
            };
            drop(state);
            carry_out(action);
        }
    }
}
