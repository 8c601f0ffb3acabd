//! The memories of an operation while it moves on.

use std::ops::{DerefMut, Range};

use super::program::{Copy, Home, Part, Place};
use crate::reduce::Kernel;

/// One memory of an operation.
#[derive(Debug)]
pub(crate) enum Body<'a, M> {
    Registered(&'a mut M),
    Slice(&'a mut [u8]),
    ReadOnly(&'a [u8]),
    Empty,
}

impl<M: DerefMut<Target = [u8]>> Body<'_, M> {
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Self::Registered(memory) => memory,
            Self::Slice(slice) => slice,
            Self::ReadOnly(slice) => slice,
            Self::Empty => &[],
        }
    }

    /// Returns the bytes for writing; none if they are only for reading.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Registered(memory) => memory,
            Self::Slice(slice) => slice,
            Self::ReadOnly(_) | Self::Empty => &mut [],
        }
    }
}

impl<'a, M> Body<'a, M> {
    pub(super) fn of(memory: &'a mut Option<M>) -> Self {
        memory.as_mut().map_or(Self::Empty, Self::Registered)
    }
}

/// All memories of an operation, by [`Home`].
#[derive(Debug)]
pub(super) struct Bodies<'a, M>(pub(super) [Body<'a, M>; 4]);

impl<M: DerefMut<Target = [u8]>> Bodies<'_, M> {
    pub(super) fn bytes(&self, place: Place, length: usize) -> &[u8] {
        &self.0[place.home as usize].bytes()[place.at..place.at + length]
    }

    pub(super) fn bytes_mut(&mut self, place: Place, length: usize) -> &mut [u8] {
        &mut self.0[place.home as usize].bytes_mut()[place.at..place.at + length]
    }

    /// Returns the registered memory of a home, if it is registered.
    pub(super) fn registered(&self, home: Home) -> Option<&M> {
        match &self.0[home as usize] {
            Body::Registered(memory) => Some(memory),
            _ => None,
        }
    }

    pub(super) fn copy(&mut self, copy: &Copy) {
        if copy.from.home == copy.to.home {
            let from: Range<usize> = copy.from.at..copy.from.at + copy.length;
            self.0[copy.to.home as usize].bytes_mut().copy_within(from, copy.to.at);
        } else if let Some((to, from)) = self.pair(copy.to.home, copy.from.home) {
            to[copy.to.at..copy.to.at + copy.length]
                .copy_from_slice(&from[copy.from.at..copy.from.at + copy.length]);
        }
    }

    /// Takes a piece of a message, which starts `offset` bytes after its beginning.
    pub(super) fn take(&mut self, kernel: Option<&Kernel>, parts: &[Part], offset: usize, piece: &[u8]) {
        let first = parts.partition_point(|part| part.offset + part.length <= offset);
        for part in &parts[first..] {
            let start = part.offset.max(offset);
            let end = (part.offset + part.length).min(offset + piece.len());
            if start >= end {
                break;
            }
            let bytes = &piece[start - offset..end - offset];
            let into = Place { home: part.into.home, at: part.into.at + (start - part.offset) };
            let reduce =
                part.reduce.map(|place| Place { home: place.home, at: place.at + (start - part.offset) });
            match (reduce, kernel) {
                (Some(with), Some(kernel)) => self.reduce(kernel, into, with, bytes),
                _ => self.bytes_mut(into, bytes.len()).copy_from_slice(bytes),
            }
        }
    }

    fn reduce(&mut self, kernel: &Kernel, into: Place, with: Place, bytes: &[u8]) {
        let length = bytes.len();
        if with == into {
            kernel.reduce(self.bytes_mut(into, length), bytes);
        } else if with.home == into.home {
            self.copy(&Copy { from: with, to: into, length });
            kernel.reduce(self.bytes_mut(into, length), bytes);
        } else if let Some((to, from)) = self.pair(into.home, with.home) {
            kernel.reduce_into(&mut to[into.at..into.at + length], &from[with.at..with.at + length], bytes);
        }
    }

    /// Carries out a part of a local step.
    pub(super) fn local(&mut self, kernel: Option<&Kernel>, part: &Part) {
        let Some(with) = part.with else { return };
        let copy = |from| Copy { from, to: part.into, length: part.length };
        let (Some(reduce), Some(kernel)) = (part.reduce, kernel) else {
            return self.copy(&copy(with));
        };
        // The order of the two does not change a reduction's result.
        let other = if with == part.into {
            reduce
        } else {
            if reduce != part.into {
                self.copy(&copy(reduce));
            }
            with
        };
        if other.home == part.into.home {
            self.reduce_within(kernel, part.into, other, part.length);
        } else if let Some((to, from)) = self.pair(part.into.home, other.home) {
            kernel.reduce(
                &mut to[part.into.at..part.into.at + part.length],
                &from[other.at..other.at + part.length],
            );
        }
    }

    /// Reduces between two places of one memory.
    fn reduce_within(&mut self, kernel: &Kernel, into: Place, with: Place, length: usize) {
        let bytes = self.0[into.home as usize].bytes_mut();
        if into.at < with.at {
            let (low, high) = bytes.split_at_mut(with.at);
            kernel.reduce(&mut low[into.at..into.at + length], &high[..length]);
        } else {
            let (low, high) = bytes.split_at_mut(into.at);
            kernel.reduce(&mut high[..length], &low[with.at..with.at + length]);
        }
    }

    /// Returns two different memories, the first for writing.
    fn pair(&mut self, to: Home, from: Home) -> Option<(&mut [u8], &[u8])> {
        let [to, from] = self.0.get_disjoint_mut([to as usize, from as usize]).ok()?;
        Some((to.bytes_mut(), from.bytes()))
    }
}
