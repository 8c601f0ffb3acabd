//! Collects the steps of a plan.

use std::ops::Range;

use super::dependencies::Dependencies;
use super::step::{Action, Area, Arguments, Collective, Plan, Span, Step, part};

/// The largest number of pieces of a whole, so that a plan has an upper bound.
const MOST_PIECES: usize = 1 << 12;

/// A plan under construction.
#[derive(Debug)]
pub(super) struct Builder {
    pub(super) rank: usize,
    pub(super) ranks: usize,
    pub(super) elements: usize,
    pub(super) in_place: bool,
    /// The largest number of elements of a message that is done at once; see [`Arguments::inline`].
    pub(super) inline: usize,
    collective: Collective,
    piece: usize,
    scratch: usize,
    steps: Vec<Step>,
    dependencies: Dependencies,
}

impl Builder {
    pub(super) fn new(arguments: &Arguments, rank: usize) -> Self {
        Self {
            rank,
            ranks: arguments.ranks,
            elements: arguments.elements,
            in_place: arguments.in_place,
            inline: arguments.inline,
            collective: arguments.collective,
            piece: arguments
                .piece
                .max(arguments.elements.div_ceil(MOST_PIECES))
                .clamp(1, arguments.elements.max(1)),
            scratch: 0,
            steps: Vec::new(),
            dependencies: Dependencies::new(arguments.in_place),
        }
    }

    pub(super) fn plan(self) -> Plan {
        Plan { steps: self.steps, scratch: self.scratch }
    }

    /// Returns the part of a rank. Ranks beyond the last one count from 0 again.
    pub(super) fn part(&self, rank: usize) -> Range<usize> {
        part(self.elements, self.ranks, rank % self.ranks)
    }

    /// Returns the rank `distance` places behind this one in the ring of ranks. `distance` is at most the number of ranks.
    pub(super) fn behind(&self, distance: usize) -> usize {
        (self.rank + self.ranks - distance) % self.ranks
    }

    /// Returns the rank `distance` places ahead of this one in the ring of ranks.
    pub(super) fn ahead(&self, distance: usize) -> usize {
        (self.rank + distance) % self.ranks
    }

    /// Divides a range into pieces for one message each. An empty range has no piece. Both ends of a message call it with ranges
    /// of the same length.
    pub(super) fn pieces(&self, range: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let (piece, end) = (self.piece, range.end);
        range.step_by(piece).map(move |start| start..end.min(start + piece))
    }

    /// Reserves scratch memory: the elements from 0 to `elements`.
    pub(super) fn reserve(&mut self, elements: usize) {
        self.scratch = self.scratch.max(elements);
    }

    /// Sends elements, as one message. Returns the index of the step.
    pub(super) fn send(&mut self, to: usize, from: Span) -> u32 {
        self.push(Action::Send { to, from }, &[])
    }

    /// Receives one message. Returns the index of the step.
    pub(super) fn receive(&mut self, from: usize, into: Span, reduce: Option<Span>) -> u32 {
        self.push(Action::Receive { from, into, reduce }, &[])
    }

    /// Sends a range, one message for each piece. `span` says where a piece lies.
    pub(super) fn send_pieces(
        &mut self,
        to: usize,
        range: Range<usize>,
        span: impl Fn(Range<usize>) -> Span,
    ) {
        for piece in self.pieces(range) {
            self.send(to, span(piece));
        }
    }

    /// Receives a range of Work, one message for each piece.
    pub(super) fn receive_pieces(&mut self, from: usize, range: Range<usize>) {
        for piece in self.pieces(range) {
            self.receive(from, Span::work(piece), None);
        }
    }

    /// Copies this rank's part, for an all-gather out of place, to where it lies in the whole.
    pub(super) fn copy_own(&mut self) {
        let own = if self.in_place { 0..0 } else { self.part(self.rank) };
        for piece in self.pieces(own.clone()) {
            self.local(Span::input(shifted(piece.clone(), own.start)), Span::work(piece), None);
        }
    }

    /// Copies or reduces within this rank.
    pub(super) fn local(&mut self, with: Span, into: Span, reduce: Option<Span>) {
        self.push(Action::Local { with, into, reduce }, &[]);
    }

    /// Marks elements as final, before they are sent on.
    pub(super) fn finish(&mut self, span: Span) {
        self.push(Action::Finish { span }, &[]);
    }

    /// Adds a step that also waits for the steps `also`, with which it shares no elements.
    pub(super) fn push(&mut self, action: Action, also: &[u32]) -> u32 {
        let step = self.steps.len() as u32;
        let after = self.dependencies.add(step, &action, also, &self.steps);
        self.steps.push(Step { action, after });
        step
    }

    /// Makes the plan of a group of one rank: the result is the input, or a copy.
    pub(super) fn alone(&mut self) {
        for piece in self.pieces(0..self.elements) {
            if !self.in_place {
                self.local(Span::input(piece.clone()), Span::work(piece.clone()), None);
            }
            if matches!(self.collective, Collective::AllReduce | Collective::ReduceScatter) {
                self.finish(Span::work(piece));
            }
        }
    }

    /// Returns where the final part of this rank lies after a reduce-scatter: `piece` counts in the whole.
    pub(super) fn scattered(&self, piece: Range<usize>) -> Span {
        match self.in_place {
            true => Span::work(piece),
            false => Span::work(shifted(piece, self.part(self.rank).start)),
        }
    }
}

impl Span {
    pub(super) fn input(range: Range<usize>) -> Self {
        Self { area: Area::Input, range }
    }

    pub(super) fn work(range: Range<usize>) -> Self {
        Self { area: Area::Work, range }
    }

    pub(super) fn scratch(range: Range<usize>) -> Self {
        Self { area: Area::Scratch, range }
    }
}

/// Returns the range, counted from `origin`.
pub(super) fn shifted(range: Range<usize>, origin: usize) -> Range<usize> {
    range.start - origin..range.end - origin
}
