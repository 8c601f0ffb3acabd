//! A connection that carries messages instead of a byte stream.

use std::sync::Arc;

use super::Connection;
use super::state::State;
use crate::endpoint::aftermath::Aftermath;
use crate::endpoint::counters::Counters;
use crate::endpoint::fault::ConnectionFault;
use crate::endpoint::messages::handler::MessageHandler;
use crate::endpoint::messages::settings::MessageSettings;
use crate::endpoint::messages::traffic::Messages;
use crate::protocol::AbortCode;
use tonic_rdma_verbs::internal::lock;

impl Connection {
    /// Takes the handler of the messages, and delivers the messages that have arrived already.
    pub(crate) fn start_messages(&self, handler: Arc<dyn MessageHandler>, settings: &MessageSettings) {
        self.settle_messages(|state| {
            let by_copy = state.link.queue_pair().reads_by_copy();
            if let Some(messages) = &mut state.messages {
                messages.start(handler, settings, by_copy);
            }
        });
    }

    /// Sends what the handler has.
    pub(crate) fn drive(&self) {
        self.settle_messages(|_| ());
    }

    /// Closes the connection in good order, once the handler has no more messages.
    pub(crate) fn close_messages(&self) {
        self.settle_messages(|state| state.detached = true);
        self.changed.notify_one();
    }

    /// Returns the length of the longest message to the peer.
    #[cfg(test)]
    pub(crate) fn max_message(&self) -> usize {
        lock(&self.state).protocol.max_payload()
    }

    /// Calls `change`, does what is due, and carries out what follows from it without the lock.
    fn settle_messages(&self, change: impl FnOnce(&mut State)) {
        let mut after = Aftermath::reused();
        let mut state = lock(&self.state);
        change(&mut state);
        state.settle(&self.counters, &self.changed);
        state.take_aftermath(&mut after);
        drop(state);
        after.carry_out();
        after.reuse();
    }
}

impl State {
    /// Does all that is due on a message connection: delivers, lets the handler send, and posts receives, READs and control messages.
    pub(super) fn progress_messages(
        &mut self,
        messages: &mut Messages,
        counters: &Counters,
    ) -> Result<(), ConnectionFault> {
        messages.fetches.renew();
        loop {
            let has_work = messages.deliver(&self.link, &mut self.protocol, counters)?;
            if self.detached && !messages.is_started() {
                self.discard();
            }
            self.post_receives()?;
            self.handle_events()?;
            if has_work || self.detached {
                messages.transmit(&mut self.link, &mut self.protocol, counters)?;
            }
            // A fetch may be over at once.
            if !messages.fetches.has_over() {
                break;
            }
        }
        if self.detached && messages.is_exhausted() {
            self.protocol.close_write();
        }
        self.post_control(counters)
    }

    /// Delivers what had arrived before the connection was lost.
    pub(super) fn deliver_messages(&mut self, counters: &Counters) -> Result<(), ConnectionFault> {
        if self.fault.is_some() {
            return Ok(());
        }
        match &mut self.messages {
            Some(messages) => messages.deliver(&self.link, &mut self.protocol, counters).map(drop),
            None => Ok(()),
        }
    }

    /// Moves the work for the thread that holds the lock to `after`.
    pub(super) fn take_aftermath(&mut self, after: &mut Aftermath) {
        if let Some(messages) = &mut self.messages {
            after.append(&mut messages.after);
        }
    }
}

impl Connection {
    /// Ends a message connection, and tells the peer.
    pub(crate) fn abort_messages(&self, code: AbortCode) {
        self.abort(code, ConnectionFault::Closed);
    }
}
