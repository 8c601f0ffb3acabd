//! Takes the frames of a body apart into gRPC's messages, so that each large message is sent as a whole.
//!
//! A body's frames have no meaning: a message may be a part of a frame, or have several frames. gRPC puts a
//! prefix before each message, with the message's length. [`Outgoing`] reads these prefixes. A large message
//! goes to the stream in its parts, together with the offset of its longest part, or of its last large one.
//! These are large fields where [`gather`](crate::gather) encodes the body.

use std::sync::Arc;

use bytes::{Buf, Bytes, BytesMut};

use super::landed::{AlignedField, PREFIX};
use super::session::Sink;
use super::times::CallTimes;

/// The messages of one body.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    /// The parts of a large message that is not complete.
    parts: Vec<Bytes>,
    /// Bytes that are missing for the end of the message, parts included.
    missing: usize,
    /// The bytes are not gRPC messages, or the boundary of the next message is not known: they are sent as
    /// they are.
    opaque: bool,
    /// Where the lengths of the messages are recorded, and the bytes until the next prefix.
    lengths: Option<Arc<CallTimes>>,
    until_next: usize,
}

impl Outgoing {
    /// Messages of this length and more are sent as a whole. Below, a copy costs less.
    const LARGE: usize = 4096;
    /// A message of one part is one that tonic has copied together, and has to be copied once more. Above
    /// this length it is sent as bytes, so that the peer reads what is copied while the rest is copied.
    const COPIED: usize = 256 << 10;
    /// Most parts of a message. An offer has twice as many segments, because long parts may be taken apart.
    const PARTS: usize = 128;

    /// Makes the messages of a body, whose lengths are recorded if `lengths` is there.
    pub(super) fn recorded(lengths: Option<Arc<CallTimes>>) -> Self {
        Self { lengths, ..Self::default() }
    }

    /// Records the lengths of the messages that begin in `data`, the next frame. A prefix in two frames, which no
    /// encoder of gRPC makes, ends the record.
    pub(super) fn record(&mut self, data: &[u8]) {
        let Some(lengths) = self.lengths.take() else { return };
        while self.until_next < data.len() {
            let Some(length) = length_of(&data[self.until_next..]) else { return };
            lengths.sends(length - PREFIX);
            self.until_next = self.until_next.saturating_add(length);
        }
        self.until_next -= data.len();
        self.lengths = Some(lengths);
    }

    /// Queues a frame of the body. With `end` it is the last one.
    pub(super) fn send(&mut self, sink: &impl Sink, mut data: Bytes, end: bool) {
        self.record(&data);
        while !data.is_empty() && !self.opaque {
            if self.missing > 0 {
                let more = data.split_to(self.missing.min(data.len()));
                self.add(sink, more, end && data.is_empty());
                continue;
            }
            let small = self.small(&data);
            if small == data.len() || self.opaque {
                break;
            }
            if small > 0 {
                sink.send_data(data.split_to(small), false);
            }
            // `small` has seen the prefix.
            self.missing = length_of(&data).unwrap_or(data.len());
        }
        if !data.is_empty() {
            self.flush(sink, false);
            sink.send_data(data, end);
        } else if end {
            self.flush(sink, true);
        }
    }

    /// Queues what is there of a message that is not complete. Call this when the body ends, or has nothing
    /// more for now.
    pub(super) fn flush(&mut self, sink: &impl Sink, end: bool) {
        let count = self.parts.len();
        for (index, part) in self.parts.drain(..).enumerate() {
            sink.send_data(part, end && index + 1 == count);
        }
        // This message can't be sent as a whole any more. If its rest never comes, what follows can't be told
        // from it, either.
        self.opaque |= self.missing > 0 && count > 0;
    }

    /// Returns whether `data`, the next frame, is whole small messages, which a sink gets as they are.
    pub(super) fn is_small(&mut self, data: &Bytes) -> bool {
        self.missing == 0 && !self.opaque && self.small(data) == data.len()
    }

    /// Returns the length of the small messages at the start of `data`.
    fn small(&mut self, data: &Bytes) -> usize {
        let mut at = 0;
        while at < data.len() {
            match length_of(&data[at..]) {
                Some(length) if length >= Self::LARGE => break,
                Some(length) if length <= data.len() - at => at += length,
                // A prefix or a small message in two frames: no encoder of gRPC makes these.
                _ => {
                    self.opaque = true;
                    break;
                }
            }
        }
        at
    }

    /// Adds a part of a large message, and queues the message if it is complete.
    fn add(&mut self, sink: &impl Sink, part: Bytes, end: bool) {
        self.missing -= part.len();
        self.parts.push(part);
        if self.missing > 0 {
            return;
        }
        let parts = merged(std::mem::take(&mut self.parts));
        if let [only] = &*parts
            && only.len() > Self::COPIED
        {
            sink.send_data(only.clone(), end);
        } else {
            let aligned_at = aligned_offset(sink.aligned_field(), &parts);
            sink.send_message(parts, aligned_at, end);
        }
    }
}

/// Copies neighbours together, short ones first, until there are at most `PARTS`.
fn merged(mut parts: Vec<Bytes>) -> Vec<Bytes> {
    let mut longest = 512;
    while parts.len() > Outgoing::PARTS {
        let mut fewer: Vec<Bytes> = Vec::with_capacity(parts.len() / 2);
        for part in parts {
            match fewer.last_mut() {
                Some(last) if last.len() + part.len() <= longest => {
                    // The first copy is of a part that others may have, the next ones only grow.
                    let mut joined = BytesMut::from(std::mem::take(last));
                    joined.extend_from_slice(&part);
                    *last = joined.freeze();
                }
                _ => fewer.push(part),
            }
        }
        parts = fewer;
        longest *= 2;
    }
    parts
}

/// Returns the length of the message whose prefix is at the start of `data`, with its prefix.
fn length_of(data: &[u8]) -> Option<usize> {
    let mut prefix = data.get(..PREFIX)?;
    prefix.advance(1);
    (prefix.get_u32() as usize).checked_add(PREFIX)
}

/// Returns the offset in the message of its longest part, or of its last large part if `aligned` asks for it
/// and there is one. In a message of one part, it is the offset after the prefix.
fn aligned_offset(aligned: AlignedField, parts: &[Bytes]) -> usize {
    let (mut at, mut longest, mut place) = (0, 0, PREFIX);
    for part in parts {
        let is_last = aligned == AlignedField::Last && part.len() >= Outgoing::LARGE;
        if part.len() > longest || is_last {
            (longest, place) = (part.len().max(longest), at.max(PREFIX));
        }
        at += part.len();
    }
    place
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use std::cell::RefCell;

    use bytes::BufMut;
    use proptest::prelude::*;
    use support::Meters;

    use super::*;
    use crate::endpoint::Role;
    use crate::grpc::times::MESSAGE_BYTES;

    /// What was queued: bytes, or the lengths of a message's parts and the aligned place; and whether it ends
    /// the body.
    #[derive(Debug, PartialEq, Eq)]
    enum Queued {
        Data(usize, bool),
        Message(Vec<usize>, usize, bool),
    }

    #[derive(Default)]
    struct Log {
        aligned: AlignedField,
        queued: RefCell<Vec<Queued>>,
        bytes: RefCell<Vec<u8>>,
    }

    impl Sink for Log {
        fn send_data(&self, data: Bytes, end: bool) {
            self.bytes.borrow_mut().extend_from_slice(&data);
            self.queued.borrow_mut().push(Queued::Data(data.len(), end));
        }

        fn send_message(&self, parts: Vec<Bytes>, aligned_at: usize, end: bool) {
            self.bytes.borrow_mut().extend(parts.iter().flatten());
            let lengths = parts.iter().map(Bytes::len).collect();
            self.queued.borrow_mut().push(Queued::Message(lengths, aligned_at, end));
        }

        fn aligned_field(&self) -> AlignedField {
            self.aligned
        }
    }

    fn message(length: usize) -> Vec<u8> {
        let mut message = vec![0];
        message.put_u32(length as u32);
        message.extend((0..length).map(|at| at as u8));
        message
    }

    fn sent(frames: &[&[u8]], end: bool) -> Vec<Queued> {
        let (log, mut outgoing) = (Log::default(), Outgoing::default());
        for (index, frame) in frames.iter().enumerate() {
            outgoing.send(&log, Bytes::copy_from_slice(frame), end && index + 1 == frames.len());
        }
        outgoing.flush(&log, false);
        assert_eq!(*log.bytes.borrow(), frames.concat());
        log.queued.into_inner()
    }

    #[test]
    fn small_messages_stay_together_and_large_ones_go_alone() {
        let frame = [message(3), message(0), message(5000), message(7), message(8)].concat();
        assert_eq!(
            sent(&[&frame], true),
            [Queued::Data(13, false), Queued::Message(vec![5005], 5, false), Queued::Data(25, true)]
        );
        assert_eq!(sent(&[&message(0)], true), [Queued::Data(5, true)]);
        assert_eq!(sent(&[&message(4091)], true), [Queued::Message(vec![4096], 5, true)]);
    }

    #[test]
    fn a_message_in_several_frames_is_aligned_at_its_longest_part() {
        let whole = message(20_000);
        let frames = [&whole[..9], &whole[9..9000], &whole[9000..9010], &whole[9010..]];
        assert_eq!(sent(&frames, true), [Queued::Message(vec![9, 8991, 10, 10_995], 9010, true)]);
        let (whole, next) = (message(6000), message(2));
        let frames = [&whole[..100], &[&whole[100..], &next[..]].concat()];
        assert_eq!(
            sent(&frames, false),
            [Queued::Message(vec![100, 5905], 100, false), Queued::Data(7, false)]
        );
    }

    /// An offer has a limit of segments.
    #[test]
    fn a_message_of_many_parts_has_neighbours_copied_together() {
        let whole = message(1000 * 300 + 100_000);
        let mut frames: Vec<_> = whole[..300_000].chunks(300).collect();
        frames.push(&whole[300_000..]);
        let [Queued::Message(parts, aligned_at, true)] = &sent(&frames, true)[..] else {
            panic!("one message")
        };
        assert!(parts.len() <= 128, "{} parts", parts.len());
        assert_eq!((parts.iter().sum::<usize>(), parts[parts.len() - 1]), (whole.len(), 100_005));
        assert_eq!(*aligned_at, 300_000, "the longest part is as it was");
    }

    #[test]
    fn a_message_is_aligned_at_its_last_large_part_where_that_is_wanted() {
        let place = |lengths: &[usize]| {
            let log = Log { aligned: AlignedField::Last, ..Log::default() };
            let whole = Bytes::from(message(lengths.iter().sum::<usize>() - PREFIX));
            let (mut at, mut outgoing) = (0, Outgoing::default());
            for length in lengths {
                outgoing.send(&log, whole.slice(at..at + length), false);
                at += length;
            }
            match log.queued.into_inner().as_slice() {
                [Queued::Message(parts, aligned_at, false)] if parts == lengths => *aligned_at,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(place(&[10, 40_000, 6, 4096]), 40_016);
        assert_eq!(place(&[10, 40_000, 6, 4095]), 10, "no body that is promised");
        assert_eq!(place(&[10, 4096, 6, 40_000, 20]), 4112);
        assert_eq!(place(&[5000]), PREFIX);
        assert_eq!(place(&[2000, 3000]), 2000, "the longest if none is large");
    }

    #[test]
    fn a_body_that_pauses_within_a_message_is_sent_as_it_is() {
        let (log, mut outgoing) = (Log::default(), Outgoing::default());
        let whole = Bytes::from(message(5000));
        outgoing.send(&log, whole.slice(..1000), false);
        assert_eq!(*log.queued.borrow(), []);
        outgoing.flush(&log, false);
        outgoing.send(&log, whole.slice(1000..), false);
        outgoing.send(&log, message(5000).into(), true);
        let expected = [Queued::Data(1000, false), Queued::Data(4005, false), Queued::Data(5005, true)];
        assert_eq!(log.queued.into_inner(), expected);
    }

    #[test]
    fn the_length_of_each_message_is_recorded_once_whatever_its_frames_are() {
        let meters = Meters::default();
        meters.within(|| {
            let lengths = CallTimes::new(Role::Client, Arc::default());
            let mut outgoing = Outgoing::recorded(Some(Arc::clone(&lengths)));
            let whole = [message(3), message(0), message(70_000), message(5000)].concat();
            for frame in [&whole[..20], &whole[20..60_000], &whole[60_000..]] {
                outgoing.send(&Log::default(), Bytes::copy_from_slice(frame), false);
            }
            // The prefix of a message in two frames.
            outgoing.send(&Log::default(), Bytes::from_static(&[0, 0]), false);
            outgoing.send(&Log::default(), Bytes::from_static(&[0, 0, 9]), false);
            drop((lengths, outgoing));
            let up_to =
                |le| meters.sum(&format!("{MESSAGE_BYTES}_bucket"), &[("le", le), ("side", "client")]);
            assert_eq!(["16", "4096", "16384", "262144"].map(up_to), [2.0, 2.0, 3.0, 4.0]);
            assert_eq!(meters.sum(&format!("{MESSAGE_BYTES}_sum"), &[]), 75_003.0);
        });
    }

    proptest! {
        #[test]
        fn all_bytes_go_on_in_order(frames in prop::collection::vec(prop::collection::vec(0_u8..3, 0..9000), 0..6)) {
            let (log, mut outgoing) = (Log::default(), Outgoing::default());
            for frame in &frames {
                outgoing.send(&log, Bytes::copy_from_slice(frame), false);
            }
            outgoing.flush(&log, false);
            prop_assert_eq!(log.bytes.into_inner(), frames.concat());
        }
    }
}
