//! What is to be done, in order, by one thread at a time.

use std::collections::VecDeque;
use std::sync::Mutex;

use crate::lock::lock;

/// Actions that wait to be carried out.
#[derive(Debug)]
pub(crate) struct Outbox<A> {
    state: Mutex<ActionQueue<A>>,
}

#[derive(Debug)]
struct ActionQueue<A> {
    actions: VecDeque<A>,
    busy: bool,
}

impl<A> Outbox<A> {
    pub(crate) fn new() -> Self {
        Self { state: Mutex::new(ActionQueue { actions: VecDeque::new(), busy: false }) }
    }

    /// Adds actions. Called under the lock of whoever decides their order.
    pub(crate) fn add(&self, actions: impl IntoIterator<Item = A>) {
        lock(&self.state).actions.extend(actions);
    }

    /// Carries out all there are, and those that come of it, unless somebody is at it already: then that one does.
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
