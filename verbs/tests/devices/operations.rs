//! Every opcode, in single requests and in batches.

use std::io::IoSlice;

use tonic_rdma_verbs::{CompletionOpcode, Operation, Payload, PostErrorKind, SendRequest};

use crate::fabric::{
    Fabric, Options, Side, connected, content, default_pair, pattern, remote, segment, until_placed,
};

pub fn send_and_receive(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    let message = pattern(1, 1000);
    a.fill(0, &message);
    b.post_receive(7, 4096, 2000);
    a.send(8, 0, message.len());
    a.expect(8, CompletionOpcode::Send);
    let received = b.expect(7, CompletionOpcode::Receive);
    assert_eq!((received.byte_len, received.immediate), (1000, None));
    assert_eq!(received.queue_pair, b.pair.number());
    assert_eq!(b.content(4096, 1000), message);
    assert_eq!(b.content(5096, 1000), vec![0; 1000], "nothing beyond the message may be touched");
}

/// Checks that a device without immediate data refuses such requests, and that the refusal has no other
/// effect.
fn expect_no_immediate(a: &Side, b: &Side) {
    let data = Payload::Inline(&[IoSlice::new(b"x")]);
    let immediate = Some(1);
    for operation in
        [Operation::Send { data, immediate }, Operation::Write { data, remote: b.remote(0), immediate }]
    {
        assert_eq!(a.try_post(1, operation).unwrap_err().kind, PostErrorKind::Unsupported);
    }
    b.post_receive(2, 0, 8);
    a.send(3, 0, 8);
    a.expect(3, CompletionOpcode::Send);
    b.expect(2, CompletionOpcode::Receive);
    a.expect_nothing();
}

pub fn send_with_immediate(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    if a.immediate(0).is_none() {
        return expect_no_immediate(&a, &b);
    }
    for immediate in [0, 1, u32::MAX] {
        b.post_receive(1, 0, 64);
        let data = Payload::Inline(&[IoSlice::new(b"beside it")]);
        a.post(2, Operation::Send { data, immediate: Some(immediate) });
        a.expect(2, CompletionOpcode::Send);
        assert_eq!(b.expect(1, CompletionOpcode::Receive).immediate, Some(immediate));
        assert_eq!(b.content(0, 9), b"beside it");
    }
}

pub fn write(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    let message = pattern(2, 70_000);
    a.fill(100, &message);
    a.write(1, a.segment(100, message.len()), b.remote(5));
    a.expect(1, CompletionOpcode::Write);
    until_placed(fabric, &a, &b);
    assert_eq!(b.content(5, message.len()), message);
    b.expect_nothing();
}

pub fn write_with_immediate(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    if a.immediate(0).is_none() {
        return expect_no_immediate(&a, &b);
    }
    let message = pattern(3, 300);
    a.fill(0, &message);
    b.post_receive(9, 0, 16);
    let segments = [a.segment(0, 300)];
    let data = Payload::Registered(&segments);
    a.post(1, Operation::Write { data, remote: b.remote(4096), immediate: Some(77) });
    a.expect(1, CompletionOpcode::Write);
    let received = b.expect(9, CompletionOpcode::ReceiveWriteWithImmediate);
    assert_eq!((received.byte_len, received.immediate), (300, Some(77)));
    assert_eq!(b.content(4096, 300), message);
    assert_eq!(b.content(0, 16), [0; 16], "the receive's own buffer stays untouched");
}

pub fn read(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    let message = pattern(4, 70_000);
    b.fill(3, &message);
    a.read(1, a.segment(500, message.len()), b.remote(3));
    a.expect(1, CompletionOpcode::Read);
    assert_eq!(a.content(500, message.len()), message);
    b.expect_nothing();
}

/// Memory that the peer can't map works like shared memory, at one end and at both ends.
pub fn private_memory(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    let (ours, theirs) = (a.private_region(1 << 20), b.private_region(1 << 20));
    let message = pattern(5, (1 << 20) - 64);
    ours.memory().copy_in(0, &message).unwrap();
    a.write(1, segment(&ours, 0, message.len()), remote(&theirs, 64));
    a.expect(1, CompletionOpcode::Write);
    until_placed(fabric, &a, &b);
    assert_eq!(content(&theirs, 64, message.len()), message);
    a.read(2, a.segment(0, message.len()), remote(&theirs, 64));
    a.expect(2, CompletionOpcode::Read);
    assert_eq!(a.content(0, message.len()), message);
    b.try_post_receive(3, &[segment(&theirs, 0, message.len())]).unwrap();
    a.send(4, 0, message.len());
    a.expect(4, CompletionOpcode::Send);
    b.expect(3, CompletionOpcode::Receive);
    assert_eq!(content(&theirs, 0, message.len()), message);
}

pub fn inline(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    b.post_receive(1, 0, 512);
    let slices = [IoSlice::new(b"one "), IoSlice::new(b""), IoSlice::new(b"two")];
    a.post(2, Operation::Send { data: Payload::Inline(&slices), immediate: None });
    a.expect(2, CompletionOpcode::Send);
    assert_eq!(b.expect(1, CompletionOpcode::Receive).byte_len, 7);
    assert_eq!(b.content(0, 7), b"one two");
    let data = Payload::Inline(&slices);
    a.post(3, Operation::Write { data, remote: b.remote(100), immediate: None });
    a.expect(3, CompletionOpcode::Write);
    until_placed(fabric, &a, &b);
    assert_eq!(b.content(100, 7), b"one two");
}

/// The device copies an inline payload before the call returns, even if the message has to wait.
pub fn inline_is_taken_over(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    let length = a.inline(400);
    let mut message = pattern(6, length);
    if !fabric.sends_wait_for_receives() {
        b.post_receive(2, 0, 512);
    }
    a.post(1, Operation::Send { data: Payload::Inline(&[IoSlice::new(&message)]), immediate: None });
    message.fill(0);
    if fabric.sends_wait_for_receives() {
        b.post_receive(2, 0, 512);
    }
    a.expect(1, CompletionOpcode::Send);
    b.expect(2, CompletionOpcode::Receive);
    assert_eq!(b.content(0, length), pattern(6, length));
}

pub fn scatter_and_gather(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    let message = pattern(7, 600);
    a.fill(0, &message[..100]);
    a.fill(1000, &message[100..350]);
    a.fill(2000, &message[350..]);
    let gather = [a.segment(0, 100), a.segment(1000, 250), a.segment(2000, 250)];
    b.try_post_receive(1, &[b.segment(0, 300), b.segment(5000, 10), b.segment(9000, 700)]).unwrap();
    a.post(2, Operation::Send { data: Payload::Registered(&gather), immediate: None });
    a.expect(2, CompletionOpcode::Send);
    assert_eq!(b.expect(1, CompletionOpcode::Receive).byte_len, 600);
    let got = [b.content(0, 300), b.content(5000, 10), b.content(9000, 290)].concat();
    assert_eq!(got, message);
    b.fill(20_000, &message);
    let scatter = [a.segment(30_000, 1), a.segment(40_000, 500), a.segment(50_000, 99)];
    let read = Operation::Read { into: &scatter, remote: b.remote(20_000) };
    if a.context.attributes().max_read_segments >= 3 {
        a.post(3, read);
        a.expect(3, CompletionOpcode::Read);
        let got = [a.content(30_000, 1), a.content(40_000, 500), a.content(50_000, 99)].concat();
        assert_eq!(got, message);
    } else {
        assert_eq!(a.try_post(3, read).unwrap_err().kind, PostErrorKind::TooManySegments);
    }
    a.post(
        4,
        Operation::Write { data: Payload::Registered(&gather), remote: b.remote(60_000), immediate: None },
    );
    a.expect(4, CompletionOpcode::Write);
    until_placed(fabric, &a, &b);
    assert_eq!(b.content(60_000, 600), message);
}

pub fn zero_length(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    b.try_post_receive(1, &[]).unwrap();
    a.post(2, Operation::Send { data: Payload::Registered(&[]), immediate: a.immediate(5) });
    a.expect(2, CompletionOpcode::Send);
    let received = b.expect(1, CompletionOpcode::Receive);
    assert_eq!((received.byte_len, received.immediate), (0, a.immediate(5)));
    a.post(3, Operation::Write { data: Payload::Registered(&[]), remote: b.remote(0), immediate: None });
    a.expect(3, CompletionOpcode::Write);
    a.post(4, Operation::Read { into: &[], remote: b.remote(0) });
    a.expect(4, CompletionOpcode::Read);
    b.post_receive(5, 0, 10);
    a.post(6, Operation::Send { data: Payload::Inline(&[]), immediate: None });
    a.expect(6, CompletionOpcode::Send);
    assert_eq!(b.expect(5, CompletionOpcode::Receive).byte_len, 0);
    b.expect_nothing();
}

/// A message of exactly the length of the receive.
pub fn exact_fit(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    let message = pattern(8, 1 << 20);
    a.fill(0, &message);
    b.post_receive(1, 0, 1 << 20);
    a.send(2, 0, 1 << 20);
    a.expect(2, CompletionOpcode::Send);
    assert_eq!(b.expect(1, CompletionOpcode::Receive).byte_len, 1 << 20);
    assert_eq!(b.content(0, 1 << 20), message);
}

/// One request of the maximum length of the device, or of [`Fabric::large_request`] bytes if that is less.
/// The first, last and middle bytes are checked.
pub fn maximum_length(fabric: &dyn Fabric) {
    let limit = fabric.open().unwrap().attributes().max_message_size;
    let length = limit.min(fabric.large_request()) as usize;
    let (a, b) = connected(fabric, &Options { memory: length, ..Options::default() });
    let stamps = [0, length / 3, length - 64];
    for (index, offset) in stamps.into_iter().enumerate() {
        b.fill(offset, &pattern(index as u64, 64));
    }
    a.read(1, a.segment(0, length), b.remote(0));
    a.expect(1, CompletionOpcode::Read);
    for (index, offset) in stamps.into_iter().enumerate() {
        assert_eq!(a.content(offset, 64), pattern(index as u64, 64));
    }
}

pub fn selective_signalling(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    for round in 0..100 {
        let message = pattern(round, 64);
        a.fill(0, &message);
        for index in 0..9u64 {
            let segments = [a.segment(0, 64)];
            let data = Payload::Registered(&segments);
            let write = Operation::Write { data, remote: b.remote(64 * index as usize), immediate: None };
            a.post_unsignaled(index, write);
        }
        a.write(1000 + round, a.segment(0, 64), b.remote(576));
        a.expect(1000 + round, CompletionOpcode::Write);
        a.expect_nothing();
        until_placed(fabric, &a, &b);
        assert_eq!(b.content(0, 640), message.repeat(10));
    }
}

/// Many requests of every kind in batches complete in the order of posting, with the effect of that order.
pub fn ordering(fabric: &dyn Fabric) {
    let (a, b) = default_pair(fabric);
    for round in 0..200u64 {
        let size = 1 + (round as usize * 37) % 3000;
        let (first, second) = (pattern(round, size), pattern(round + 1000, size));
        a.fill(0, &first);
        a.fill(8192, &second);
        b.post_receive(round, 65_536, size);
        if a.immediate(0).is_some() {
            b.post_receive(round + 1, 0, 0);
        }
        let (one, two, back) = ([a.segment(0, size)], [a.segment(8192, size)], [a.segment(16_384, size)]);
        let (one, two) = (Payload::Registered(&one), Payload::Registered(&two));
        let operations = [
            Operation::Write { data: one, remote: b.remote(0), immediate: None },
            Operation::Write { data: two, remote: b.remote(0), immediate: None },
            Operation::Read { into: &back, remote: b.remote(0) },
            Operation::Send { data: one, immediate: None },
            Operation::Write { data: one, remote: b.remote(20_000), immediate: a.immediate(round as u32) },
        ];
        let requests: Vec<_> = (0..)
            .zip(operations)
            .map(|(index, operation)| SendRequest { wr_id: round * 10 + index, operation, signaled: true })
            .collect();
        a.pair.post_send(&requests).unwrap();
        let write = CompletionOpcode::Write;
        let opcodes = [write, write, CompletionOpcode::Read, CompletionOpcode::Send, write];
        for (index, opcode) in (0..).zip(opcodes) {
            a.expect(round * 10 + index, opcode);
        }
        b.expect(round, CompletionOpcode::Receive);
        if let Some(immediate) = a.immediate(round as u32) {
            let last = b.expect(round + 1, CompletionOpcode::ReceiveWriteWithImmediate);
            assert_eq!((last.byte_len, last.immediate), (size as u64, Some(immediate)));
        }
        until_placed(fabric, &a, &b);
        assert_eq!(a.content(16_384, size), second, "the read comes after both writes");
        assert_eq!(b.content(65_536, size), first);
        assert_eq!(b.content(20_000, size), first);
    }
}

/// Both directions at once, each in its own thread.
pub fn both_directions(fabric: &dyn Fabric) {
    const ROUNDS: u64 = 3000;
    let (a, b) = default_pair(fabric);
    let length = a.inline(200);
    for side in [&a, &b] {
        for wr_id in 0..8 {
            side.post_receive(wr_id, 4096 * wr_id as usize, 256);
        }
    }
    let run = |side: &crate::fabric::Side| {
        let (mut sent, mut finished, mut received) = (0, 0, 0);
        crate::fabric::wait_until("all messages", || {
            if sent < ROUNDS && sent - finished < 4 && sent < received + 4 {
                let message = pattern(sent, length);
                let slices = [IoSlice::new(&message)];
                side.post(
                    100,
                    Operation::Send {
                        data: Payload::Inline(&slices),
                        immediate: side.immediate(sent as u32),
                    },
                );
                sent += 1;
            }
            let mut completions = [tonic_rdma_verbs::WorkCompletion::EMPTY; 4];
            let count = side.queue.poll(&mut completions);
            for completion in &completions[..count] {
                assert_eq!(completion.status, tonic_rdma_verbs::CompletionStatus::Success);
                if completion.opcode == CompletionOpcode::Send {
                    finished += 1;
                    continue;
                }
                assert_eq!(completion.immediate, side.immediate(received as u32));
                let at = 4096 * completion.wr_id as usize;
                assert_eq!(side.content(at, length), pattern(received, length));
                side.post_receive(completion.wr_id, at, 256);
                received += 1;
            }
            finished == ROUNDS && received == ROUNDS
        });
    };
    std::thread::scope(|scope| {
        scope.spawn(|| run(&a));
        scope.spawn(|| run(&b));
    });
}
