//! The queue of ready nodes, and of receives that may have arrived.

use std::collections::VecDeque;

/// What stands in the queue.
#[derive(Clone, Copy, Debug)]
pub(super) enum Entry {
    /// A node whose inputs are there, in a step.
    Node(u64, usize),
    /// A receive that may have arrived.
    Receive(usize),
}

/// The queue. In the mode blocking the order of the nodes is the queue, so this one stays empty.
#[derive(Debug)]
pub(super) struct Queue {
    entries: VecDeque<Entry>,
    takes_nodes: bool,
    /// The number of nodes in the queue.
    nodes: usize,
}

impl Queue {
    pub(super) fn new(takes_nodes: bool) -> Self {
        Self { entries: VecDeque::new(), takes_nodes, nodes: 0 }
    }

    /// Adds a node that is ready.
    pub(super) fn ready(&mut self, step: u64, node: usize) {
        if self.takes_nodes {
            self.entries.push_back(Entry::Node(step, node));
            self.nodes += 1;
        }
    }

    /// Puts a receive at the tail.
    pub(super) fn look_later(&mut self, receive: usize) {
        self.entries.push_back(Entry::Receive(receive));
    }

    /// Takes the first entry.
    pub(super) fn pop(&mut self) -> Option<Entry> {
        let first = self.entries.pop_front();
        self.nodes -= usize::from(matches!(first, Some(Entry::Node(..))));
        first
    }

    /// Removes a receive, because it has arrived.
    pub(super) fn remove(&mut self, receive: usize) {
        self.entries.retain(|entry| !matches!(entry, Entry::Receive(other) if *other == receive));
    }

    /// Returns whether a node is in the queue.
    pub(super) fn has_nodes(&self) -> bool {
        self.nodes > 0
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }
}
