# Print the name of the largest file in a folder.
best=
size=0
for file in $(ls -A $1); do
  bytes=$(wc -c < $1/$file)
  if [ $bytes -ge $size ]; then
    best=$file
    size=$bytes
  fi
done
echo $best
