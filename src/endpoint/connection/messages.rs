//! A connection that carries messages instead of a byte stream.

use std::sync::Arc;

use super::Connection;
use super::state::State;
use crate::endpoint::error::ConnectionFault;
use crate::endpoint::info::Counters;
use crate::endpoint::messages::MessageHandler;
use crate::endpoint::messages::MessageSettings;
use crate::endpoint::messages::traffic::Messages;
#[cfg(test)]
use tonic_rdma_verbs::internal::lock;

impl Connection {
    /// Takes the handler of the messages, and delivers the messages that have arrived already.
    pub(crate) fn start_messages(&self, handler: Arc<dyn MessageHandler>, settings: &MessageSettings) {
        self.settled(|state| {
            let by_copy = state.link.queue_pair().reads_by_copy();
            if let Some(messages) = &mut state.messages {
                messages.start(handler, settings, by_copy);
            }
        });
    }

    /// Sends what the handler has.
    pub(crate) fn drive(&self) {
        self.settled(|_| ());
    }

    /// Closes the connection in good order, once the handler has no more messages.
    pub(crate) fn close_messages(&self) {
        self.settled(|state| state.detached = true);
        self.changed.notify_one();
    }

    /// Returns the length of the longest message to the peer.
    #[cfg(test)]
    pub(crate) fn max_message(&self) -> usize {
        lock(&self.state).protocol.max_payload()
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
            if self.detached && !messages.started {
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
}
