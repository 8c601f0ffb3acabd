//! The share of a model's variables that one server holds.

/// One of several servers. Variables go to the servers in turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shard {
    number: usize,
    of: usize,
}

impl Shard {
    /// All variables: there is one server.
    #[cfg(test)]
    pub(crate) const WHOLE: Self = Self { number: 0, of: 1 };

    /// Makes the share of server `number` of `of` servers.
    pub(crate) const fn new(number: usize, of: usize) -> Self {
        Self { number, of }
    }

    /// Returns the shares of all of `servers` servers.
    pub(crate) fn all(servers: usize) -> impl Iterator<Item = Self> {
        (0..servers).map(move |number| Self::new(number, servers))
    }

    /// Returns the number of the server.
    pub(crate) const fn number(self) -> usize {
        self.number
    }

    /// Returns the numbers of this share's variables, of `count` variables in all.
    pub(crate) fn indices(self, count: usize) -> impl Iterator<Item = usize> {
        (self.number..count).step_by(self.of)
    }

    /// Returns the number of the variable at `position` of this share.
    pub(crate) const fn index(self, position: usize) -> usize {
        self.number + position * self.of
    }

    /// Returns the position of variable `index` in this share, or `None` if another server holds it.
    pub(crate) const fn position(self, index: usize) -> Option<usize> {
        if index % self.of == self.number { Some(index / self.of) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variable_belongs_to_one_server() {
        for servers in 1..=8 {
            let mut holders = [0; 11];
            for shard in Shard::all(servers) {
                for (position, index) in shard.indices(11).enumerate() {
                    holders[index] += 1;
                    assert_eq!((shard.position(index), shard.index(position)), (Some(position), index));
                }
            }
            assert_eq!(holders, [1; 11]);
        }
        assert_eq!(Shard::new(1, 3).position(2), None);
    }
}
