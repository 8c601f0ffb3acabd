//! The names of choices, such as modes: clap's names for the variants of a type with `#[derive(ValueEnum)]`.

use std::collections::BTreeSet;
use std::sync::Mutex;

use clap::ValueEnum;
use tonic_rdma_verbs::unstable::lock;

use crate::failure::ValueError;

/// A choice with a name on the command line, in tables and in JSON.
pub trait Named: ValueEnum {
    /// Returns the name, which is empty for a variant that the command line skips.
    fn name(&self) -> &'static str;
}

impl<T: ValueEnum> Named for T {
    fn name(&self) -> &'static str {
        // clap allocates a name with each call. A program has few names, so each is kept, and never freed.
        static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
        let Some(value) = self.to_possible_value() else { return "" };
        let mut names = lock(&NAMES);
        names.get(value.get_name()).copied().unwrap_or_else(|| {
            let name: &'static str = value.get_name().to_owned().leak();
            names.insert(name);
            name
        })
    }
}

/// Displays choices by their names.
#[macro_export]
macro_rules! displayed_by_name {
    ($($choice:ty),+) => {$(
        impl std::fmt::Display for $choice {
            fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.pad($crate::Named::name(self))
            }
        }
    )+};
}

/// Returns the choice with the name `text`. It is for items of lists; clap itself parses an option with one
/// value.
///
/// # Errors
///
/// Fails if there is none. The error names the `kind` of the choice and all names.
pub fn parse_name<T: ValueEnum>(kind: &'static str, text: &str) -> Result<T, ValueError> {
    let all = T::value_variants();
    all.iter().find(|value| value.name() == text).cloned().ok_or_else(|| {
        let names: Vec<_> = all.iter().map(Named::name).filter(|name| !name.is_empty()).collect();
        ValueError::unknown_name(kind, text, names.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lists::{List, name_list};

    #[derive(Clone, Debug, PartialEq, ValueEnum)]
    enum Path {
        DropIn,
        #[value(name = "grpc-tcp")]
        Tcp,
    }

    #[test]
    fn choices_are_found_by_the_names_that_they_have() {
        assert_eq!(
            [Path::DropIn.name(), Path::Tcp.name(), Path::Tcp.name()],
            ["drop-in", "grpc-tcp", "grpc-tcp"]
        );
        assert_eq!(name_list("path")("grpc-tcp,drop-in"), Ok(List(vec![Path::Tcp, Path::DropIn])));
        let error = parse_name::<Path>("path", "tcp").map_err(|error| error.to_string());
        assert_eq!(error, Err("unknown path \"tcp\"; accepted: drop-in, grpc-tcp".to_owned()));
    }
}
