//! Memory that its owner takes back while a peer reads it, and the states of an end.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use loom::thread;
use tonic_rdma_verbs::unstable::shared_memory::{
    ENTRY, EndState, Entry, Failure, Orders, Word, holds, remove, unless_revoked,
};
use tonic_rdma_verbs::{Access, CompletionStatus};

use crate::{Loom, LoomWord, explore, words};

const KEY: u32 = 5;
const OLD: u64 = 0;
const NEW: u64 = 7;

/// Returns an entry whose numbers are all `value`.
fn entry(value: u64) -> Entry {
    Entry {
        access: Access::REMOTE_READ,
        address: value,
        length: value,
        segment: value,
        domain: value,
        start: value,
        queue_pair: value,
    }
}

/// The owner makes a key invalid, and uses the memory again. A copy of the peer that has read the new content
/// is discarded.
pub fn copies_by_key_are_discarded<O: Orders + 'static>() -> u64 {
    explore(|| {
        let (table, memory) = (Arc::new(words(ENTRY)), Arc::new(words(2)));
        entry(1).insert::<Loom, O>(&table, KEY);
        let owner = {
            let (table, memory) = (Arc::clone(&table), Arc::clone(&memory));
            thread::spawn(move || {
                remove::<Loom, O>(&table);
                memory.iter().for_each(|word| word.store(NEW, Relaxed));
            })
        };
        // As `Pulls::read`.
        if Entry::find::<Loom, O>(&table, KEY).is_some() {
            let copy: Vec<u64> = memory.iter().map(|word| word.load(Relaxed)).collect();
            let valid = unless_revoked::<Loom, O>(|| holds::<Loom>(&table, KEY));
            assert!(
                !valid || copy == [OLD; 2],
                "model: a copy of revoked memory is taken for valid: {copy:?}"
            );
        }
        assert!(owner.join().is_ok());
    })
}

/// The owner ends its queue pair, and uses the memory again. As `Target::continue_pull`.
pub fn copies_of_an_ended_peer_are_discarded<O: Orders + 'static>() -> u64 {
    explore(|| {
        let (state, memory) = (Arc::new(LoomWord::new(0)), Arc::new(words(2)));
        EndState::Ready.show::<Loom, O>(&state);
        let owner = {
            let (state, memory) = (Arc::clone(&state), Arc::clone(&memory));
            thread::spawn(move || {
                EndState::Ended.show::<Loom, O>(&state);
                memory.iter().for_each(|word| word.store(NEW, Relaxed));
            })
        };
        let copy: Vec<u64> = memory.iter().map(|word| word.load(Relaxed)).collect();
        let valid = unless_revoked::<Loom, O>(|| EndState::of::<Loom, O>(&state) != EndState::Ended);
        assert!(!valid || copy == [OLD; 2], "model: a copy of revoked memory is taken for valid: {copy:?}");
        assert!(owner.join().is_ok());
    })
}

/// The owner makes a key valid. A peer that sees the key sees its entry.
pub fn entries_come_before_their_keys<O: Orders + 'static>() -> u64 {
    explore(|| {
        let table = Arc::new(words(ENTRY));
        let owner = {
            let table = Arc::clone(&table);
            thread::spawn(move || entry(1).insert::<Loom, O>(&table, KEY))
        };
        if let Some(found) = Entry::find::<Loom, O>(&table, KEY) {
            assert!(found == entry(1), "model: the entry is torn: {found:?}");
        }
        assert!(owner.join().is_ok());
    })
}

/// The owner gives the slot of an entry to another region. An entry that is of both regions is discarded.
pub fn mixed_entries_are_discarded<O: Orders + 'static>() -> u64 {
    explore(|| {
        let table = Arc::new(words(ENTRY));
        entry(1).insert::<Loom, O>(&table, KEY);
        let owner = {
            let table = Arc::clone(&table);
            thread::spawn(move || {
                remove::<Loom, O>(&table);
                entry(2).insert::<Loom, O>(&table, KEY + 1);
            })
        };
        if let Some(found) = Entry::find::<Loom, O>(&table, KEY) {
            let valid = unless_revoked::<Loom, O>(|| holds::<Loom>(&table, KEY));
            assert!(
                !valid || found == entry(1),
                "model: an entry of two regions is taken for valid: {found:?}"
            );
        }
        assert!(owner.join().is_ok());
    })
}

/// A peer that sees that an end is ready sees what the owner has stored before.
pub fn a_ready_end_is_complete<O: Orders + 'static>() -> u64 {
    explore(|| {
        let (state, timer) = (Arc::new(LoomWord::new(0)), Arc::new(LoomWord::new(0)));
        let owner = {
            let (state, timer) = (Arc::clone(&state), Arc::clone(&timer));
            thread::spawn(move || {
                timer.store(1, Relaxed);
                EndState::Ready.show::<Loom, O>(&state);
            })
        };
        if EndState::of::<Loom, O>(&state) == EndState::Ready {
            assert!(timer.load(Relaxed) == 1, "model: the end is ready without its settings");
        }
        assert!(owner.join().is_ok());
    })
}

/// A peer that sees the end of a queue pair sees the record that it refused, with the record's position.
pub fn a_refused_record_is_seen_before_the_end<O: Orders + 'static>() -> u64 {
    explore(|| {
        let words = Arc::new(words(3));
        let failure = Failure { at: 64, status: CompletionStatus::RemoteAccess };
        let owner = {
            let words = Arc::clone(&words);
            thread::spawn(move || {
                failure.show::<Loom, O>([&words[1], &words[2]]);
                EndState::Ended.show::<Loom, O>(&words[0]);
            })
        };
        // As `SendQueue::flush`.
        let state = EndState::of::<Loom, O>(&words[0]);
        let found = Failure::of::<Loom, O>([&words[1], &words[2]]);
        assert!(found.is_none_or(|found| found == failure), "model: the failure is torn: {found:?}");
        assert!(state != EndState::Ended || found.is_some(), "model: the end has no reason");
        assert!(owner.join().is_ok());
    })
}
