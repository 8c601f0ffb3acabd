//! Both ends without polling: each waits by futures for what has to come, as the book's example of tensors does.

use std::time::Instant;

use tokio::sync::mpsc;

use super::super::client::CallError;
use super::super::operations::Operation;
use super::caller::Stream;
use super::geometry::MAX_DEPTH;
use super::record::Record;
use super::route::{From, Route, To, keep, variant_of};
use super::service::Command;
use super::sink::Sink;

impl Route {
    /// Waits until a buffer is free for the next operation.
    pub(super) async fn ready(&mut self) -> Result<(), CallError> {
        match &mut self.to {
            To::Slots { slots, .. } => {
                for slot in slots {
                    slot.ready().await?;
                }
                Ok(())
            }
            To::Batch(batched) => Ok(batched.header.ready().await?),
        }
    }

    /// Sends an operation once a buffer is free, and waits until its payload is where it belongs.
    pub(super) async fn send(&mut self, operation: &Operation) -> Result<(), CallError> {
        let variant = variant_of(self.seed, operation);
        match &mut self.to {
            To::Slots { slots, from: From::Regions(regions) } => {
                let place = regions.get_mut(variant).ok_or(CallError::Unprepared)?;
                let (Some(slot), Some(region)) = (slots.first_mut(), place.take()) else {
                    return Err(CallError::Unprepared);
                };
                Ok(keep(place, slot.send_region(region).await)?)
            }
            To::Slots { slots, from: From::Registered(tensors) } => {
                for (slot, tensor) in slots.iter_mut().zip(&tensors[variant]) {
                    slot.send(tensor).await?;
                }
                Ok(())
            }
            To::Slots { slots, from: From::Anywhere } => {
                for (slot, (_, buffer)) in slots.iter_mut().zip(operation.buffers()) {
                    slot.send_bytes(buffer).await?;
                }
                Ok(())
            }
            To::Batch(batched) => {
                batched.header.ready().await?;
                batched.send(operation, self.seed).await
            }
        }
    }

    /// Waits until the receiver has released all that was sent.
    pub(super) async fn flush(&mut self) -> Result<(), CallError> {
        match &mut self.to {
            // They are released in the order of the slots.
            To::Slots { slots, .. } => match slots.last_mut() {
                Some(slot) => Ok(slot.flush().await?),
                None => Ok(()),
            },
            To::Batch(batched) => Ok(batched.header.flush().await?),
        }
    }
}

impl Stream {
    /// What [`run`](Self::run) does, without polling. With one operation at a time it is sent, and its release waited for. With
    /// several, what waits for a buffer waits for the release of the oldest.
    pub(super) async fn run_awaiting(
        &mut self,
        route: &mut Route,
        record: &mut Record,
        callers: usize,
    ) -> Result<(), CallError> {
        let depth = callers.clamp(1, MAX_DEPTH);
        loop {
            while !self.waiting.is_empty() {
                if self.under_way.len() >= depth {
                    self.wait(route).await?;
                }
                let operation = self.take();
                route.send(&operation).await?;
                self.started(route, record, &operation);
                self.look(route)?;
            }
            if self.under_way.is_empty() {
                return Ok(());
            }
            self.wait(route).await?;
        }
    }

    /// Waits until an operation has ended, the oldest if the slot is full, and counts all that have.
    async fn wait(&mut self, route: &mut Route) -> Result<(), CallError> {
        let under_way = self.under_way.len();
        self.look(route)?;
        if self.under_way.len() < under_way {
            return Ok(());
        }
        if under_way > 1 && !route.is_ready()? {
            route.ready().await?;
        } else {
            route.flush().await?;
        }
        self.look(route)
    }

    fn look(&mut self, route: &mut Route) -> Result<(), CallError> {
        let pending = route.pending()? as usize;
        if pending < self.under_way.len() {
            self.finish(pending, Instant::now());
        }
        Ok(())
    }
}

/// Takes what arrives until the turn ends; false if its command channel is closed.
pub(super) async fn turn(sink: &mut Sink, commands: &mut mpsc::Receiver<Command>) -> bool {
    let mut result = Ok(());
    loop {
        let command = tokio::select! {
            biased;
            received = sink.recv(), if result.is_ok() => {
                result = received;
                continue;
            }
            command = commands.recv() => command,
        };
        match command {
            Some(Command::End { ended }) => {
                let _ = ended.send(result.map(|()| sink.record()));
                return true;
            }
            Some(Command::Begin { .. }) => {}
            None => return false,
        }
    }
}
