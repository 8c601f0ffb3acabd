//! A peer that violates the protocol: each violation is named, and nothing panics.

use std::time::Instant;

use proptest::prelude::*;

use crate::protocol::{Connection, ProtocolViolation, ReadId, Settings, SlotIndex};
use crate::wire::{Chunk, Header, MAX_CHUNKS, MessageKind};

fn connection() -> Connection {
    let settings = Settings { receive_slots: 16, slot_size: 1024, max_chunk: 1 << 20, ..Settings::default() };
    Connection::new(settings, Instant::now()).unwrap()
}

fn header(kind: MessageKind, sequence: u64, body: usize) -> Header {
    Header { kind, end_of_message: false, body_length: body as u32, sequence, granted: 32, reads_done: 0 }
}

fn receive(connection: &mut Connection, header: Header, body: &[u8]) -> Result<(), ProtocolViolation> {
    let length = Header::LENGTH + header.body_length as usize;
    connection.handle_receive(SlotIndex(0), &header, body, length, Instant::now())
}

#[test]
fn settings_that_cannot_work_are_refused_by_name() {
    for (settings, name) in [
        (Settings { peer_slots: 0, ..Settings::default() }, "the peer's receive slots"),
        (Settings { peer_slot_size: 10, ..Settings::default() }, "the peer's slot size"),
        (Settings { receive_slots: 1, ..Settings::default() }, "receive slots"),
        (Settings { send_queue: 1, ..Settings::default() }, "send queue"),
        (Settings { max_reads: 0, ..Settings::default() }, "outstanding reads"),
    ] {
        let error = Connection::new(settings, Instant::now()).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
}

#[test]
fn wrong_lengths_and_sequence_numbers_are_refused() {
    let mut it = connection();
    let message = header(MessageKind::Eager, 0, 10);
    let short = it.handle_receive(SlotIndex(0), &message, &[], 41, Instant::now());
    assert_eq!(short, Err(ProtocolViolation::Length { received: 41, promised: 10 }));
    let none = it.handle_receive(SlotIndex(0), &message, &[], 3, Instant::now());
    assert_eq!(none, Err(ProtocolViolation::Length { received: 3, promised: 10 }));
    let long = receive(&mut it, header(MessageKind::Eager, 0, 1000), &[]);
    assert_eq!(long, Err(ProtocolViolation::Length { received: 1032, promised: 1000 }));
    let seen = receive(&mut it, header(MessageKind::Eager, 5, 10), &[]);
    assert_eq!(seen, Err(ProtocolViolation::Sequence { seen: 5, expected: 0 }));
}

#[test]
fn impossible_counts_are_refused() {
    let granted =
        |granted| receive(&mut connection(), Header { granted, ..header(MessageKind::Ack, 0, 0) }, &[]);
    let most = u64::from(Settings::MAX_SLOTS);
    assert_eq!(granted(31), Err(ProtocolViolation::CreditsGranted { seen: 31, least: 32, most }));
    assert_eq!(granted(most + 1), Err(ProtocolViolation::CreditsGranted { seen: most + 1, least: 32, most }));
    assert_eq!(granted(32), Ok(()));
    assert_eq!(granted(most), Ok(()));
    let read = receive(&mut connection(), Header { reads_done: 1, ..header(MessageKind::Ack, 0, 0) }, &[]);
    assert_eq!(read, Err(ProtocolViolation::ChunksRead { seen: 1, least: 0, most: 0 }));
}

#[test]
fn data_and_a_second_fin_after_a_fin_are_refused() {
    let mut it = connection();
    receive(&mut it, header(MessageKind::Fin, 0, 0), &[]).unwrap();
    assert_eq!(receive(&mut it, header(MessageKind::Eager, 1, 4), &[]), Err(ProtocolViolation::DataAfterFin));
    let mut it = connection();
    receive(&mut it, header(MessageKind::Fin, 0, 0), &[]).unwrap();
    assert_eq!(receive(&mut it, header(MessageKind::Fin, 1, 0), &[]), Err(ProtocolViolation::SecondFin));
}

#[test]
fn too_long_and_too_many_chunks_are_refused() {
    let offer = |length| Chunk { address: 1, rkey: 2, length }.encode();
    let mut it = connection();
    let refused = receive(&mut it, header(MessageKind::Rts, 0, 20), &offer(1 << 21));
    assert_eq!(refused, Err(ProtocolViolation::ChunkTooLong { length: 1 << 21, most: 1 << 20 }));
    let mut it = connection();
    let eight = offer(10).repeat(MAX_CHUNKS);
    let refused = (0..9)
        .map(|sequence| receive(&mut it, header(MessageKind::Rts, sequence, eight.len()), &eight))
        .find(Result::is_err);
    assert_eq!(refused, Some(Err(ProtocolViolation::TooManyChunks(65))));
}

#[test]
fn control_messages_of_wrong_length_are_refused() {
    for kind in [MessageKind::Ping, MessageKind::Pong, MessageKind::Abort, MessageKind::Return] {
        let refused = receive(&mut connection(), header(kind, 0, 3), &[1, 2, 3]);
        assert_eq!(refused, Err(ProtocolViolation::ControlBody(3)), "{kind:?}");
    }
    for kind in [MessageKind::Ack, MessageKind::Fin] {
        assert_eq!(
            receive(&mut connection(), header(kind, 0, 1), &[1]),
            Err(ProtocolViolation::ControlBody(1)),
            "{kind:?}"
        );
    }
    let pong = receive(&mut connection(), header(MessageKind::Pong, 0, 8), &5_u64.to_le_bytes());
    assert_eq!(pong, Err(ProtocolViolation::UnexpectedPong));
}

#[test]
fn messages_beyond_the_announced_credits_are_refused() {
    let mut it = connection();
    it.widen(5);
    for sequence in 0..16 {
        assert_eq!(receive(&mut it, header(MessageKind::Eager, sequence, 1), &[]), Ok(()));
    }
    // Five more credits were granted, but they were not announced to the peer.
    let refused = receive(&mut it, header(MessageKind::Eager, 16, 1), &[]);
    assert_eq!(refused, Err(ProtocolViolation::CreditsExceeded { granted: 16 }));
}

#[test]
fn credits_that_the_peer_cannot_have_are_not_taken_back() {
    let give_back = |it: &mut Connection, count: u32| {
        receive(it, header(MessageKind::Return, 0, 4), &count.to_le_bytes()).map(|()| it.window())
    };
    let refused = |seen, most| Err(ProtocolViolation::CreditsReturned { seen, most });
    assert_eq!(give_back(&mut connection(), 1), refused(1, 0));
    // The peer can't return ten credits that were not announced.
    let mut it = connection();
    it.widen(10);
    assert_eq!(give_back(&mut it, 16), refused(16, 10));
    let mut it = connection();
    it.widen(100);
    assert_eq!(give_back(&mut it, 16), refused(16, 15));
    let mut it = connection();
    it.widen(100);
    it.ping();
    it.poll_transmit().unwrap();
    assert_eq!(give_back(&mut it, u32::MAX), refused(u32::MAX, 100));
    let mut it = connection();
    it.widen(100);
    it.ping();
    it.poll_transmit().unwrap();
    it.widen(7);
    assert_eq!(give_back(&mut it, 60), Ok(56), "and the 7 that were not announced");
}

fn headers() -> impl Strategy<Value = (Header, Vec<u8>)> {
    let kinds = prop::sample::select(vec![
        MessageKind::Eager,
        MessageKind::Rts,
        MessageKind::Ack,
        MessageKind::Fin,
        MessageKind::Abort,
        MessageKind::Ping,
        MessageKind::Pong,
        MessageKind::Return,
    ]);
    let chunks = prop::collection::vec((any::<u64>(), 0..1_u64 << 21), 0..10);
    let noise = prop::collection::vec(any::<u8>(), 0..30);
    (kinds, 0..12_u64, 30..40_u64, 0..3_u64, chunks, noise, any::<bool>()).prop_map(
        |(kind, sequence, granted, reads_done, chunks, noise, sensible)| {
            let mut body = noise;
            if kind == MessageKind::Rts && sensible {
                let chunks = chunks.iter().map(|&(address, length)| Chunk { address, rkey: 1, length });
                body = chunks.flat_map(|chunk| chunk.encode()).collect();
            }
            let body_length = body.len() as u32;
            (Header { kind, end_of_message: false, body_length, sequence, granted, reads_done }, body)
        },
    )
}

proptest! {
    /// Messages of any kind in any order, mostly in sequence: the connection takes them or names the
    /// violation, and its answers stay within its limits.
    #[test]
    fn any_messages_are_taken_or_refused(messages in prop::collection::vec((headers(), 0..10_u8), 1..40)) {
        let mut it = connection();
        for (sequence, ((mut header, body), honest)) in (0..).zip(messages) {
            if honest > 0 {
                (header.sequence, header.granted, header.reads_done) = (sequence, 32, 0);
            }
            let body = if header.kind == MessageKind::Eager { &[][..] } else { &body[..] };
            if receive(&mut it, header, body).is_err() {
                return Ok(());
            }
            while it.poll_release().is_some() {
                it.handle_slots_posted(1);
            }
            if it.peek_read().is_some() {
                it.start_read();
            }
            it.handle_read_completed(ReadId(header.body_length));
            while it.poll_transmit().is_some() {
                it.handle_sends_completed(1);
            }
            while it.poll_event().is_some() {}
            if let Some(part) = it.front() {
                let (crate::protocol::Part::Eager { length, .. } | crate::protocol::Part::Rendezvous { length, .. }) = part;
                it.consume(length);
            }
        }
    }
}
