//! The streams of a connection: their slots, their numbers, and the queues in which they wait.

use std::collections::VecDeque;
use std::ops::{Index, IndexMut};

use slab::Slab;

use super::stream::{NumberMap, Queue, Stream, StreamKey};
use crate::grpc::frame::{CallViolation, Kind};

/// All streams. The number of an open call leads to its stream, a stream knows which queues have it, and its
/// slot is free once its call has ended, its handle is gone and no queue has it.
#[derive(Debug, Default)]
pub(super) struct Streams {
    slots: Slab<Stream>,
    /// The streams whose calls are open, by number.
    open: NumberMap<u32, StreamKey>,
    /// The number of the last call that was opened.
    last_number: u32,
    /// The streams of each [`Queue`], the first one to be served first.
    queues: [VecDeque<StreamKey>; 6],
    /// How many streams of each queue that wait to send belong to calls that have ended.
    closed: [usize; 6],
}

impl Index<StreamKey> for Streams {
    type Output = Stream;

    fn index(&self, key: StreamKey) -> &Stream {
        &self.slots[key.index()]
    }
}

impl IndexMut<StreamKey> for Streams {
    fn index_mut(&mut self, key: StreamKey) -> &mut Stream {
        &mut self.slots[key.index()]
    }
}

impl Streams {
    pub(super) fn get(&self, key: StreamKey) -> Option<&Stream> {
        self.slots.get(key.index())
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (StreamKey, &Stream)> {
        self.slots.iter().map(|(index, stream)| (StreamKey(index as u32), stream))
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Stream> {
        self.slots.iter_mut().map(|(_, stream)| stream)
    }

    /// Returns the number of streams, those of ended calls with a handle included.
    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Returns the number of calls that are open.
    pub(super) fn open_len(&self) -> usize {
        self.open.len()
    }

    /// Returns the number of calls that have not ended.
    pub(super) fn active(&self) -> usize {
        self.open.len() + self.queue(Queue::Unopened).len() - self.closed[Queue::Unopened as usize]
    }

    /// Returns the stream of an open call.
    pub(super) fn by_number(&self, number: u32) -> Option<StreamKey> {
        self.open.get(&number).copied()
    }

    /// Returns the stream of a frame, or `None` if its call is closed.
    pub(super) fn find(&self, kind: Kind, number: u32) -> Result<Option<StreamKey>, CallViolation> {
        let found = self.by_number(number);
        if found.is_none() && (number == 0 || number > self.last_number) {
            return Err(CallViolation::UnknownStream { kind, stream: number });
        }
        Ok(found)
    }

    /// Returns the number of the last call that was opened.
    pub(super) fn last_number(&self) -> u32 {
        self.last_number
    }

    /// Returns whether the numbers of streams are used up.
    pub(super) fn is_used_up(&self) -> bool {
        self.last_number == u32::MAX - 1
    }

    /// Adds a call of this client, which waits for a number. Numbers of slots that do not fit into 32 bits
    /// would need more memory than there is.
    pub(super) fn insert_unopened(&mut self, stream: Stream) -> StreamKey {
        let key = StreamKey(self.slots.insert(stream) as u32);
        self.push(key, Queue::Unopened);
        key
    }

    /// Gives the next number to a call of this client, which then waits to send.
    pub(super) fn open(&mut self, key: StreamKey) {
        let stream = &mut self.slots[key.index()];
        self.last_number += 1;
        stream.id = self.last_number;
        self.open.insert(stream.id, key);
        self.push(key, Queue::Ready);
    }

    /// Checks the number of a new call of the peer.
    pub(super) fn check_new(&self, number: u32) -> Result<(), CallViolation> {
        if self.open.contains_key(&number) {
            return Err(CallViolation::SecondHeaders(number));
        }
        let last = if number == u32::MAX { number } else { self.last_number };
        if number <= last {
            return Err(CallViolation::StreamOrder { stream: number, last });
        }
        Ok(())
    }

    /// Notes that the peer has used this number, and so all below it.
    pub(super) fn set_last_number(&mut self, last: u32) {
        self.last_number = last;
    }

    /// Adds a call of the peer.
    pub(super) fn insert_open(&mut self, stream: Stream) -> StreamKey {
        let number = stream.id;
        let key = StreamKey(self.slots.insert(stream) as u32);
        self.open.insert(number, key);
        key
    }

    /// Closes both halves of a call. Returns false if they were closed.
    pub(super) fn close(&mut self, key: StreamKey) -> bool {
        let stream = &mut self.slots[key.index()];
        if std::mem::replace(&mut stream.closed, true) {
            return false;
        }
        self.open.remove(&stream.id);
        if let Some(queue) = stream.sending.queued {
            self.closed[queue as usize] += 1;
        }
        true
    }

    /// Takes streams of calls that have ended out of the queues in which streams wait for the peer, where they
    /// are at least half of the queue. So this costs a call the time of two streams.
    pub(super) fn sweep(&mut self) -> Vec<StreamKey> {
        let mut swept = Vec::new();
        for queue in [Queue::Unopened, Queue::PausedParts, Queue::PausedHeaders].map(|queue| queue as usize) {
            if self.closed[queue] == 0 || self.closed[queue] * 2 < self.queues[queue].len() {
                continue;
            }
            self.queues[queue].retain(|&key| {
                let stream = &mut self.slots[key.index()];
                if stream.closed {
                    stream.sending.queued = None;
                    swept.push(key);
                }
                !stream.closed
            });
            self.closed[queue] = 0;
        }
        swept
    }

    /// Returns the stream of a call that has ended and whose handle is gone.
    pub(super) fn over(&mut self, key: StreamKey) -> Option<&mut Stream> {
        self.slots.get_mut(key.index()).filter(|stream| stream.closed && stream.released)
    }

    /// Frees the slot of a stream that is [over](Self::over), if no queue has it. Most queues let a stream go
    /// only when they come to it.
    pub(super) fn remove_unless_queued(&mut self, key: StreamKey) {
        let stream = &self[key];
        if stream.sending.queued.is_none() && !stream.receiving.queued {
            self.slots.remove(key.index());
        }
    }

    /// Queues a stream that has something to send.
    pub(super) fn schedule(&mut self, key: StreamKey) {
        let stream = &self.slots[key.index()];
        if stream.sending.queued.is_none() && stream.id != 0 && stream.can_send() {
            self.push(key, Queue::Ready);
        }
    }

    /// Queues a stream that has offers to read.
    pub(super) fn queue_reads(&mut self, key: StreamKey) {
        self.slots[key.index()].receiving.queued = true;
        self.queues[Queue::Reads as usize].push_back(key);
    }

    /// Puts a stream behind the others that wait to send.
    fn push(&mut self, key: StreamKey, queue: Queue) {
        self.slots[key.index()].sending.queued = Some(queue);
        self.queues[queue as usize].push_back(key);
    }

    fn queue(&self, queue: Queue) -> &VecDeque<StreamKey> {
        &self.queues[queue as usize]
    }

    /// Returns whether streams are in the queue.
    pub(super) fn has(&self, queue: Queue) -> bool {
        !self.queue(queue).is_empty()
    }

    /// Returns the first stream of the queue.
    pub(super) fn front(&self, queue: Queue) -> Option<StreamKey> {
        self.queue(queue).front().copied()
    }

    /// Puts the first stream of the queue behind the others.
    pub(super) fn rotate(&mut self, queue: Queue) {
        self.queues[queue as usize].rotate_left(1);
    }

    /// Puts the first stream of the queue behind those of the other queue.
    pub(super) fn move_front(&mut self, from: Queue, to: Queue) {
        if let Some(key) = self.pop(from) {
            self.push(key, to);
        }
    }

    /// Takes the first stream out of the queue. Its call may have ended meanwhile.
    pub(super) fn pop(&mut self, queue: Queue) -> Option<StreamKey> {
        let key = self.queues[queue as usize].pop_front()?;
        let stream = &mut self.slots[key.index()];
        match queue {
            Queue::Reads => stream.receiving.queued = false,
            _ => {
                stream.sending.queued = None;
                self.closed[queue as usize] -= usize::from(stream.closed);
            }
        }
        Some(key)
    }

    /// Returns the length of all queues of streams that wait to send.
    pub(super) fn waiting(&self) -> usize {
        [Queue::Ready, Queue::Bulk, Queue::Unopened].into_iter().map(|queue| self.queue(queue).len()).sum()
    }

    /// Returns the number of streams with offers to read.
    pub(super) fn reading(&self) -> usize {
        self.queue(Queue::Reads).len()
    }

    /// Empties all queues, and frees the slots of streams whose handles are gone, because the connection has
    /// ended.
    pub(super) fn end(&mut self) {
        self.queues.iter_mut().for_each(VecDeque::clear);
        self.closed = [0; 6];
        self.slots.retain(|_, stream| {
            (stream.sending.queued, stream.receiving.queued) = (None, false);
            !stream.released
        });
    }
}

#[cfg(test)]
mod for_tests {
    use super::*;

    impl Streams {
        /// Returns the queues, in the order of [`Queue`].
        pub(in crate::grpc::core) fn queues(&self) -> &[VecDeque<StreamKey>; 6] {
            &self.queues
        }
    }
}
