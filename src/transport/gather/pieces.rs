//! The list of pieces that the codec did not copy. tonic knows one buffer only, so these pieces go from the codec to the body in this list.
//!
//! tonic calls the codec inside the body's `poll_frame`, on one thread, and returns everything that was encoded. So the body opens a list
//! before the poll, the codec adds its pieces to the list, and the body takes the list after the poll.

use std::cell::RefCell;

use tonic_rdma_verbs::internal::LargePart;

/// A message that is not whole in tonic's buffer.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Partial {
    /// The number of the message among the messages that were encoded during the poll.
    pub(super) index: usize,
    /// The number of its bytes in tonic's buffer, without the prefix of the message.
    pub(super) copied: usize,
    /// The pieces that are not in tonic's buffer.
    pub(super) pieces: Vec<LargePart>,
}

#[derive(Debug)]
struct PieceList {
    /// The shortest content of a field that is not copied, in bytes.
    threshold: usize,
    messages: usize,
    partial: Vec<Partial>,
}

thread_local! {
    static LIST: RefCell<Option<PieceList>> = const { RefCell::new(None) };
}

/// Runs `poll` with an empty list, and returns the messages that were added to it. Fields of `threshold` bytes or more are to be added.
pub(super) fn collect<R>(threshold: usize, poll: impl FnOnce() -> R) -> (R, Vec<Partial>) {
    /// Puts the list of an outer body back, also after a panic in `poll`.
    struct Outer(Option<PieceList>);
    impl Drop for Outer {
        fn drop(&mut self) {
            LIST.with_borrow_mut(|list| *list = self.0.take());
        }
    }
    let list = PieceList { threshold, messages: 0, partial: Vec::new() };
    let outer = Outer(LIST.with_borrow_mut(|outer| outer.replace(list)));
    let result = poll();
    let list = LIST.with_borrow_mut(Option::take);
    drop(outer);
    (result, list.map(|list| list.partial).unwrap_or_default())
}

/// Returns the threshold of the body that collects pieces which are not copied, if there is such a body.
pub(super) fn threshold() -> Option<usize> {
    LIST.with_borrow(|list| list.as_ref().map(|list| list.threshold))
}

/// Notes that a message was encoded: `copied` bytes of it are in tonic's buffer, and `pieces` are not.
pub(super) fn add(copied: usize, pieces: Vec<LargePart>) {
    LIST.with_borrow_mut(|list| {
        if let Some(list) = list {
            let index = list.messages;
            list.messages += 1;
            if !pieces.is_empty() {
                list.partial.push(Partial { index, copied, pieces });
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn piece() -> Vec<LargePart> {
        vec![LargePart { at: 1, bytes: Bytes::from_static(b"x") }]
    }

    #[test]
    fn lists_nest_and_end_with_their_poll() {
        assert_eq!(threshold(), None);
        add(1, piece());
        let ((), outer) = collect(9, || {
            assert_eq!(threshold(), Some(9));
            add(1, Vec::new());
            let ((), inner) = collect(8, || add(2, piece()));
            assert_eq!(inner, [Partial { index: 0, copied: 2, pieces: piece() }]);
            add(3, piece());
        });
        assert_eq!(outer, [Partial { index: 1, copied: 3, pieces: piece() }]);
        assert_eq!(threshold(), None);
    }

    #[test]
    fn a_panic_ends_the_list() {
        let caught = std::panic::catch_unwind(|| collect(7, || std::panic::resume_unwind(Box::new(()))));
        assert!(caught.is_err());
        assert_eq!(threshold(), None);
    }
}
