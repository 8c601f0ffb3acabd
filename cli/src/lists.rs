//! Lists on the command line.

/// The values of a comma-separated list: at least one, none twice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct List<T>(pub(crate) Vec<T>);

/// Parses the items of `text` between commas with `item`.
pub(crate) fn parse_list<T: PartialEq>(
    text: &str,
    item: impl Fn(&str) -> Result<T, String>,
) -> Result<List<T>, String> {
    if text.trim().is_empty() {
        return Err("the list is empty".to_owned());
    }
    let mut values = Vec::new();
    for part in text.split(',').map(str::trim) {
        if part.is_empty() {
            return Err("an item of the list is empty".to_owned());
        }
        let value = item(part)?;
        if values.contains(&value) {
            return Err(format!("{part:?} is there twice"));
        }
        values.push(value);
    }
    Ok(List(values))
}
